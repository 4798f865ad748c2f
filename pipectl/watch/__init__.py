"""Detection of lost ranks, by one small process per node that survives the ranks.

A watcher sees whether its ranks are alive, how they ended (``rank``) and what they do (``board``),
and writes that to one file per node (``report``). A pure function of all nodes' reports and their
age finds the lost rank (``judge``). The watcher of the first node reads all files and decides; the
others read the first node's file, and decide themselves if it is no longer renewed (``watcher``).
These modules use only the standard library, so that they start fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class ProcessState(NamedTuple):
    """A process, as ``/proc/PID/stat`` describes it.

    Args:
        letter: its state; ``T`` is stopped.
        started: clock ticks since boot. Together with the pid it identifies the process.
    """

    pid: int
    letter: str
    parent: int
    started: int


def process_state(pid: int, started: int | None = None) -> ProcessState | None:
    """Return None if the process has ended, is a zombie, or started at another time."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    letter, parent, *rest = text.rpartition(")")[2].split()
    state = ProcessState(pid, letter, int(parent), int(rest[17]))
    return None if letter in "ZX" or started not in (None, state.started) else state
