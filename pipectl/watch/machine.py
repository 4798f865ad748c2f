"""What the system says of a process: whether it lives, is stopped, has lost its parent."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SHARED = "/dev/shm/"
_OF_MPI = ("mpich_shm_", "sm_segment.", "vader_segment.", "psm2_shm.", "psm3_shm.")
"""How the files begin that MPIs share memory by, and leave behind if they are killed."""


class ProcessState(NamedTuple):
    """Of one process.

    Args:
        letter: as in ``/proc/PID/stat``; ``T`` is stopped.
        started: in clock ticks since boot, which tells it from a later one with its number.
    """

    letter: str
    parent: int
    started: int


def process_state(pid: int) -> ProcessState | None:
    """None when the process is gone, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    letter, parent, *rest = text.rpartition(")")[2].split()
    return None if letter in "ZX" else ProcessState(letter, int(parent), int(rest[17]))


def killed_for_memory() -> int:
    """How many processes of this machine the kernel has killed for lack of memory; 0 if unknown."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def shared_files(pid: int) -> set[str]:
    """The files by which the MPI of a process shares memory with others of its node."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[-1].strip() for line in text.splitlines()}
    return {path for path in paths if path.startswith(tuple(_SHARED + name for name in _OF_MPI))}


def remove(paths: set[str]) -> None:
    """Drop files that may be gone already."""
    for path in paths:
        with suppress(OSError):
            os.unlink(path)  # noqa: PTH108
