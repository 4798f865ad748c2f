"""The file of each node: the state of its ranks, written by the node's watcher.

The file is replaced atomically, in a directory that no other user can write to.
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
from pipectl.older_python import StrEnum
from pipectl.watch.board import Activity

State = StrEnum("State", ["LIVES", "STOPPED", "FAILS", "FAILED", "DIED", "LEFT"])
"""The state of a rank: in ``FAILS`` and ``FAILED`` it reports its own error, in ``DIED`` not."""
RESUME = "`pipectl resume RUN` continues from the last checkpoint"
_MAX_BYTES = 1 << 24
Stamp = tuple[int, int]
"""Inode and modification time of a file; one of them changes with every write."""


class RankReport(NamedTuple):
    """The state of one rank.

    Args:
        still_s: seconds without progress in its program.
        ended_at: seconds since the epoch in state ``DIED``, otherwise 0; orders the ends of the
            ranks of a node.
        was_asked: whether the signal that cancels a job ended it.
        message: why it ended or is lost; ``hint`` says what to do.
        stack: its Python stack, if it crashed.
    """

    rank: int = 0
    state: State = State.LIVES
    still_s: float = 0.0
    activity: Activity = Activity()
    ended_at: float = 0.0
    was_asked: bool = False
    message: str = ""
    hint: str = RESUME
    stack: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the rank has ended."""
        return self.state in {State.FAILED, State.DIED, State.LEFT}


class NodeReport(NamedTuple):
    """The state of the ranks of one node.

    Args:
        node: name of the node.
        ends: whether all ranks must be killed.
        stalled: who waits for whom if no rank makes progress; only the first node sets it.
        silent_s: age of the report; set by its reader.
    """

    node: str = ""
    ends: bool = False
    stalled: str = ""
    ranks: tuple[RankReport, ...] = ()
    silent_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether all ranks of the node have ended."""
        return all(rank.is_over for rank in self.ranks)

    @property
    def news(self) -> tuple[bool, str, list[State]]:
        """The part whose changes are written at once."""
        return self.ends, self.stalled, [rank.state for rank in self.ranks]


def node_path(folder: Path, node: int) -> Path:
    """Return the path of a node's file; nodes are numbered in the order of their first ranks."""
    return folder / f"node-{node:04d}.json"


def write_report(path: Path, report: NodeReport) -> None:
    """Replace a node's file; if the disk is full, update at least its modification time."""
    text = json.dumps({"version": VERSION, **report._asdict()})
    try:
        write_text(path, f"{text}\n", mode=0o600, durable=False)
    except (UsageError, OSError):
        with suppress(OSError):
            os.utime(path)


def read_report(path: Path, last: Stamp | None = None) -> tuple[Stamp, NodeReport] | None:
    """Read a node's file; None if its stamp is ``last``, or if it cannot be read.

    The file is opened each time, because network file systems check for changes only then.
    """
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):  # it is damaged
        with os.fdopen(open_regular(path, os.O_NOFOLLOW), "rb") as stream:
            status = os.fstat(stream.fileno())
            stamp = status.st_ino, status.st_mtime_ns
            document = {} if stamp == last else json.loads(stream.read(_MAX_BYTES))
        if stamp != last and document["version"] == VERSION:
            return stamp, read_value(NodeReport, document)
    return None
