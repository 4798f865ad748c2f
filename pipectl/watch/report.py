"""What is written down of a rank that has failed: a file for ``status``, text for the log."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipectl.printable import printable
from pipectl.watch.board import Sight
from pipectl.watch.verdict import Verdict
from pipectl.watch.words import Names, action

_PIECE = 4096
"""Bytes that a pipe takes at once whenever it says that it takes any."""
_PATIENCE_MS = 1000


def report_document(verdict: Verdict, sight: Sight, node: str, names: Names) -> dict[str, Any]:
    """The contents of an error file, as ranks write it that fail."""
    return {
        "version": 1,
        "rank": verdict.rank,
        "stage": None if sight.stage < 0 else sight.stage,
        "step": sight.step,
        "action": action(sight, names),
        "host": node,
        "type": None,
        "message": verdict.message,
        "cure": verdict.cure,
        "traceback": verdict.stack,
        "time": time.time() if verdict.at is None else verdict.at,
        "earlier": None if verdict.at is None else verdict.earlier,
        "exit_code": 1,
    }


def report_text(document: Mapping[str, Any]) -> str:
    """The same for people, fit for terminals; it ends with a line end.

    Args:
        document: of any error file, some fields of which may be missing.
    """
    known = {name: document.get(name) for name in ("rank", "stage", "step")}
    where = [f"{name} {value}" for name, value in known.items() if value is not None]
    kind, action, cure = (document.get(name) for name in ("type", "action", "cure"))
    place = ", ".join([*where, *([str(action)] if action else [])])
    parts = [f"pipectl: {place}: {f'{kind}: ' if kind else ''}{document.get('message')}"]
    parts += [str(document.get("traceback") or ""), f"pipectl: {cure}" if cure else ""]
    return "".join(f"{printable(part.rstrip())}\n" for part in parts if part)


def write_report(path: Path, document: Mapping[str, Any]) -> None:
    """Write the error file. A disk that fails keeps it from being written."""
    from pipectl.errors import PipectlError  # late: a watcher that reports nothing starts sooner
    from pipectl.files import write_json

    with suppress(PipectlError, OSError):
        write_json(path, document)


def write_log(log: int, text: str) -> None:
    """Write to a file descriptor what its reader takes, and never wait long for one that is stuck.

    The reader of the job's log may be gone, or frozen; nothing may end or hang by that.
    """
    data = text.encode(errors="replace")
    poll = select.poll()
    poll.register(log, select.POLLOUT)
    with suppress(OSError):
        while data and poll.poll(_PATIENCE_MS):
            data = data[os.write(log, data[:_PIECE]) :]
