"""One command at a time changes what is recorded of a run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class Lockable(Protocol):
    """A run, or a sweep."""

    @property
    def lock(self) -> Path:
        """The file that is held."""


@contextmanager
def locked(run: Lockable, *, wait: bool = True) -> Iterator[bool]:
    """Within, no other command holds the run; the system frees it with the process that held it.

    Where the file system knows no locks, or the directory cannot be written, nobody is kept out:
    files are still written whole.

    Args:
        wait: whether to wait for another command; else it is told whether the run is ours.
    """
    try:
        handle = os.open(run.lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError:
        yield True
        return
    try:
        yield _lock(handle, wait=wait)
    finally:
        os.close(handle)


def _lock(handle: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
