"""What is written down of a rank that could not do so itself, as ranks do it that fail."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

from pipectl.watch.board import Sight
from pipectl.watch.verdict import Verdict
from pipectl.watch.words import Names, action


def report(path: Path, verdict: Verdict, sight: Sight, node: str, names: Names) -> None:
    """Write an error file, for ``pipectl status``, and a line for the log.

    A disk that fails keeps the file from being written, and the line perhaps too.
    """
    doing = action(sight, names)
    stage = None if sight.stage < 0 else sight.stage
    known = {"rank": verdict.rank, "stage": stage, "step": sight.step}
    where = (f"{name} {value}" for name, value in known.items() if value is not None)
    words = ", ".join([*where, doing])
    with suppress(OSError):
        stack = f"{verdict.stack}\n" if verdict.stack else ""
        sys.stderr.write(f"pipectl: {words}: {verdict.message}\n{stack}pipectl: {verdict.cure}\n")
        sys.stderr.flush()
    from pipectl.errors import PipectlError  # late: a watcher that reports nothing starts sooner
    from pipectl.files import write_json

    document = {
        "version": 1,
        **known,
        "action": doing,
        "host": node,
        "type": None,
        "message": verdict.message,
        "cure": verdict.cure,
        "traceback": verdict.stack,
        "time": time.time() if verdict.at is None else verdict.at,
        "earlier": None if verdict.at is None else verdict.earlier,
        "exit_code": 1,
    }
    with suppress(PipectlError, OSError):
        write_json(path, document)
