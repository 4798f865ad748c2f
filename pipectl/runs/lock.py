"""One command at a time changes what is recorded of a run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pipectl.access import fault_of_owner, open_regular
from pipectl.errors import UsageError
from pipectl.runs.directory import HasPath


class Lockable(HasPath, Protocol):
    """A run, or a sweep."""

    @property
    def lock(self) -> Path:
        """The file that is held."""


@contextmanager
def locked(run: Lockable, *, wait: bool = True) -> Iterator[bool]:
    """Within, no other command holds the run; the system frees it with the process that held it.

    On a file system without locks, or if the directory cannot be written, nobody is kept out: files
    are still written whole.

    Args:
        wait: whether to wait for another command; else the value says whether the run is ours.

    Raises:
        UsageError: it belongs to another user, or others may put files there.
    """
    refuse_foreign(run.path)
    try:
        handle = open_regular(run.lock, os.O_CREAT | os.O_RDWR)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            is_ours = True
        except OSError as error:
            is_ours = not isinstance(error, BlockingIOError)
        yield is_ours
    finally:
        os.close(handle)


def refuse_foreign(directory: Path) -> None:
    """Refuse to change a run or sweep into whose directory others can write.

    What it says of jobs and processes, and its links, would be theirs.

    Raises:
        UsageError: saying who can.
    """
    if fault := fault_of_owner(directory, root=False):
        theirs = fault.startswith("belongs")
        copy = "copy it to a directory of your own, and go on with the copy"
        raise UsageError(
            f"{directory}: {fault}, so that nothing in it can be relied on",
            cure=copy if theirs else f"if you know what is in it: chmod go-w {directory}",
        )
