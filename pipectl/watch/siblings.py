"""In which order the ranks of a node ended, whenever that is looked at.

The death of one rank has its launcher kill all others within a millisecond, and on a busy machine
their watchers see that in any order. The kernel keeps the order: processes that end become ready in
an epoll instance one after the other.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path


class Siblings:
    """The processes that one launcher started on a node.

    Args:
        pid: of one of them.
        parent: of the launcher's process there.
    """

    def __init__(self, pid: int, parent: int) -> None:
        self._pid, self._parent = pid, parent
        self._epoll = select.epoll()
        self._pids: dict[int, int] = {}

    def find(self) -> None:
        """Look for those that were started since."""
        for pid in {self._pid, *_children(self._parent)} - set(self._pids.values()):
            with suppress(OSError, AttributeError):  # not every kernel has that
                handle = os.pidfd_open(pid)
                self._pids[handle] = pid
                self._epoll.register(handle, select.EPOLLIN)

    def ended_before(self) -> int:
        """How many had ended when this one did, if it has; 0 if unknown."""
        ended = [self._pids[handle] for handle, _ in self._epoll.poll(0, len(self._pids) or 1)]
        return [*ended, self._pid].index(self._pid)


def _children(pid: int) -> set[int]:
    """Of all threads of a process; none if it is gone or belongs to somebody else."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found.update(int(word) for word in path.read_text(encoding="ascii").split())
    return found
