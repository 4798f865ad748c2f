"""The files of watchers, one per node, and the error reports of ranks.

A node's file is replaced whole, in a folder to which nobody else can write. Every start of the
ranks has its own folder, which is removed when they are started again. The report of a rank that
failed is a file for ``status`` and a text for the log.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipectl.access import open_regular
from pipectl.errors import PipectlError, UsageError
from pipectl.fields import read_value
from pipectl.files import write_json, write_text
from pipectl.printable import printable
from pipectl.watch.judge import NodeReport

VERSION = 1
_MAX_BYTES = 1 << 24
_PIECE = 4096
"""Bytes that a pipe takes at once if it is writable."""
_PATIENCE_MS = 1000


def node_path(folder: Path, node: int) -> Path:
    """The file of a node; nodes are numbered by their first ranks."""
    return folder / f"node-{node:04d}.json"


class NodeFile:
    """The file of one node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None

    def write(self, report: NodeReport) -> None:
        """Replace it; if the disk is full, at least renew its time of change."""
        text = json.dumps({"version": VERSION, **report._asdict()})
        try:
            write_text(self.path, f"{text}\n", mode=0o600, durable=False)
        except (UsageError, OSError):
            with suppress(OSError):
                os.utime(self.path)

    def read(self) -> NodeReport | None:
        """The report; None if it was not written since the last call, or cannot be read.

        It is opened each time: network file systems look for changes only then.
        """
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):  # it is damaged
            with os.fdopen(open_regular(self.path, os.O_NOFOLLOW), "rb") as stream:
                status = os.fstat(stream.fileno())
                stamp = status.st_ino, status.st_mtime_ns
                if stamp == self._stamp:
                    return None
                document = json.loads(stream.read(_MAX_BYTES))
            self._stamp = stamp
            if document["version"] == VERSION:
                report: NodeReport = read_value(NodeReport, document)
                return report
        return None


def report_text(document: Mapping[str, Any]) -> str:
    """An error report for people, fit for terminals; it ends with a line end.

    Args:
        document: of any error file, some fields of which may be missing.
    """
    numbers = {name: document.get(name) for name in ("rank", "stage", "step")}
    where = [f"{name} {value}" for name, value in numbers.items() if value is not None]
    kind, action, cure = (document.get(name) for name in ("type", "action", "cure"))
    place = ", ".join([*where, *([str(action)] if action else [])])
    parts = [f"pipectl: {place}: {f'{kind}: ' if kind else ''}{document.get('message')}"]
    parts += [str(document.get("traceback") or ""), f"pipectl: {cure}" if cure else ""]
    return "".join(f"{printable(part.rstrip())}\n" for part in parts if part)


def write_report(path: Path, document: Mapping[str, Any]) -> None:
    """Write the error file; a disk that fails is ignored."""
    with suppress(PipectlError, OSError):
        write_json(path, document)


def write_log(log: int, text: str) -> None:
    """Write to a file descriptor as far as its reader takes it, without waiting long.

    The reader of the job's log may be gone or frozen; the caller must neither end nor hang.
    """
    data = text.encode(errors="replace")
    poll = select.poll()
    poll.register(log, select.POLLOUT)
    with suppress(OSError):
        while data and poll.poll(_PATIENCE_MS):
            data = data[os.write(log, data[:_PIECE]) :]
