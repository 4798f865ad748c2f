"""The file of a node's watcher: what its ranks do, and how they ended.

It is replaced whole, in a folder to which nobody else can write.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipectl.errors import UsageError
from pipectl.fields import VERSION, read_value
from pipectl.files import open_regular, write_text
from pipectl.watch.board import Activity

LIVES, STOPPED, FAILS, FAILED, DIED, LEFT = "lives", "stopped", "fails", "failed", "died", "left"
"""A rank in ``FAILS`` or ``FAILED`` reports its error itself; a rank in ``DIED`` has not."""
RESUME = "`pipectl resume RUN` continues from the last checkpoint"
_MAX_BYTES = 1 << 24
Stamp = tuple[int, int]
"""Number and time of change of a file, which differ whenever it was written."""


class RankReport(NamedTuple):
    """One rank, as its node's watcher sees it.

    Args:
        state: one of the constants above.
        still_s: time at this point of its program, stopped or not.
        ended_at: seconds since the epoch, if it is in ``DIED``; else 0. Of the ranks of a node it
            tells which ended first.
        was_asked: whether it ended by the signal that cancels a job.
        message: why it ended, or is lost; ``cure`` is what the user can do.
        stack: its Python stack, if it crashed.
    """

    rank: int = 0
    state: str = LIVES
    still_s: float = 0.0
    activity: Activity = Activity()
    ended_at: float = 0.0
    was_asked: bool = False
    message: str = ""
    cure: str = RESUME
    stack: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in (FAILED, DIED, LEFT)


class NodeReport(NamedTuple):
    """The ranks of one node, as its watcher sees them.

    Args:
        node: its name.
        ends: whether all ranks are to be killed.
        stalled: who waits for whom, if no rank has moved on for long; only from the first node.
        silent_s: age of the report; set by its reader.
    """

    node: str = ""
    ends: bool = False
    stalled: str = ""
    ranks: tuple[RankReport, ...] = ()
    silent_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether all of its ranks have ended."""
        return all(rank.is_over for rank in self.ranks)

    @property
    def news(self) -> tuple[bool, str, list[str]]:
        """What other watchers must learn at once when it changes."""
        return self.ends, self.stalled, [rank.state for rank in self.ranks]


def node_path(folder: Path, node: int) -> Path:
    """The file of a node's watcher; nodes are numbered by their first ranks."""
    return folder / f"node-{node:04d}.json"


def write_report(path: Path, report: NodeReport) -> None:
    """Replace the file of a node; if the disk is full, at least renew its time of change."""
    text = json.dumps({"version": VERSION, **report._asdict()})
    try:
        write_text(path, f"{text}\n", mode=0o600, durable=False)
    except (UsageError, OSError):
        with suppress(OSError):
            os.utime(path)


def read_report(path: Path, last: Stamp | None = None) -> tuple[Stamp, NodeReport] | None:
    """What is in the file of a node, with its stamp; None if that is the last one, or if the file
    cannot be read.

    It is opened each time: network file systems look for changes only then.
    """
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):  # it is damaged
        with os.fdopen(open_regular(path, os.O_NOFOLLOW), "rb") as stream:
            status = os.fstat(stream.fileno())
            stamp = status.st_ino, status.st_mtime_ns
            document = {} if stamp == last else json.loads(stream.read(_MAX_BYTES))
        if stamp != last and document["version"] == VERSION:
            return stamp, read_value(NodeReport, document)
    return None
