"""Watching ranks from outside: one small process per node, which outlives whatever ends a rank.

Each watcher knows of its ranks whether they live, how they ended and what they do (``rank``,
``board``), and writes that to one file per node (``report``). One pure function of the files of all
nodes, and of how old they are, says which rank is lost (``judge``). The watcher of the first node
reads all files and decides; the others read the first one's, and decide themselves if that falls
silent (``watcher``). These modules use the standard library, and little of it. Here is what others
need to know of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class ProcessState(NamedTuple):
    """One process.

    Args:
        letter: as in ``/proc/PID/stat``; ``T`` is stopped.
        started: in clock ticks since boot, which tells it from a later one with its number.
    """

    pid: int
    letter: str
    parent: int
    started: int


def process_state(pid: int, started: int | None = None) -> ProcessState | None:
    """None if the process is gone or a zombie, or if it did not start at the given time."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    letter, parent, *rest = text.rpartition(")")[2].split()
    state = ProcessState(pid, letter, int(parent), int(rest[17]))
    return None if letter in "ZX" or started not in (None, state.started) else state
