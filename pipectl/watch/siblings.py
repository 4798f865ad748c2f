"""In which order the ranks of a node ended, whenever that is looked at.

The death of one rank has its launcher kill all others within a millisecond, and on a busy machine
their watchers see that in any order. The kernel keeps the order: what happens becomes ready in an
epoll instance one after the other.

A process gives back its files before it counts as ended, and all its threads have to end in
between. MPICH's launcher kills the others when the dying rank's socket to it closes, so that one of
them may have ended first. Therefore every rank holds a socket that nobody talks to, its *sign*,
which closes at the same moment.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from pathlib import Path

_MOST_WATCHERS = 1024
"""Of a node, which reach for a sign."""


class Siblings:
    """The processes that one launcher started on a node.

    Args:
        pid: of one of them.
        parent: of the launcher's process there.
        secret: of the job.
    """

    def __init__(self, pid: int, parent: int, secret: str) -> None:
        self._pid, self._parent, self._secret = pid, parent, secret
        self._epoll = select.epoll()
        self._ends: set[int] = set()
        self._signs: dict[int, socket.socket] = {}
        self._pid_of: dict[int, int] = {}

    def find(self) -> None:
        """Look for those that were started since."""
        for pid in {self._pid, *_children(self._parent)}:
            with suppress(OSError, AttributeError):  # not every kernel has that
                if pid not in self._ends:
                    self._await(os.pidfd_open(pid), pid)
                    self._ends.add(pid)
            if pid not in self._signs:
                self._reach_for_sign(pid)

    def ended_before(self) -> int:
        """How many had ended when this one did, if it has; 0 if unknown."""
        events = self._epoll.poll(0, len(self._pid_of) or 1)
        ended = dict.fromkeys(self._pid_of[handle] for handle, _ in events)
        return [*ended, self._pid].index(self._pid)

    def _await(self, handle: int, pid: int) -> None:
        self._epoll.register(handle, select.EPOLLIN)
        self._pid_of[handle] = pid

    def _reach_for_sign(self, pid: int) -> None:
        """It is there once the rank has begun to be watched."""
        sign = socket.socket(socket.AF_UNIX)
        sign.setblocking(False)
        try:
            sign.connect(_name(self._secret, pid))
        except OSError:
            sign.close()
        else:
            self._signs[pid] = sign
            self._await(sign.fileno(), pid)


def show_sign(secret: str) -> socket.socket | None:
    """What tells the watchers on this node that this process ends, when it closes.

    None where the system has no sockets without files.
    """
    sign = socket.socket(socket.AF_UNIX)
    try:
        sign.bind(_name(secret, os.getpid()))
        sign.listen(_MOST_WATCHERS)
    except OSError:
        sign.close()
        return None
    return sign


def _name(secret: str, pid: int) -> str:
    return f"\0pipectl-{secret}-{pid}"


def _children(pid: int) -> set[int]:
    """Of all threads of a process; none if it is gone or belongs to somebody else."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found.update(int(word) for word in path.read_text(encoding="ascii").split())
    return found
