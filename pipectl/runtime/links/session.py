"""Taking turns: one experiment at a time, while all other ranks wait without using their cores.

Every rank gets every result. So all ranks take the same decisions without a message about them.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from pipectl.runtime.waiting import barrier, wait

T = TypeVar("T")
Pair = tuple[int, int]
Bytes = npt.NDArray[np.uint8]

WARM_UP = 2
FEWEST, MOST = 3, 300
"""Repeats of one measurement."""
_DATA, _WORD = 1, 2


class Peer:
    """The other rank of a pair; messages to it go as the training sends them.

    Args:
        first: whether this rank is the first of the two, the one that decides and reports.
    """

    def __init__(self, communicator: MPI.Comm, rank: int, *, first: bool) -> None:
        self._communicator = communicator
        self._rank = rank
        self.first = first

    def send(self, buffer: Bytes) -> MPI.Request:
        """Start to send a buffer."""
        return self._communicator.Isend([buffer, MPI.BYTE], self._rank, _DATA)

    def receive(self, buffer: Bytes) -> MPI.Request:
        """Start to receive into a buffer."""
        return self._communicator.Irecv([buffer, MPI.BYTE], self._rank, _DATA)

    def agree(self, value: int) -> int:
        """The first rank's value, on both."""
        word = np.array([value], dtype=np.int64)
        if self.first:
            wait([self._communicator.Isend([word, MPI.INT64_T], self._rank, _WORD)])
        else:
            wait([self._communicator.Irecv([word, MPI.INT64_T], self._rank, _WORD)])
        return int(word[0])

    def meet(self) -> None:
        """Return when the other rank has come here too."""
        mine, other = np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.uint8)
        receiving = self._communicator.Irecv([other, MPI.BYTE], self._rank, _WORD)
        wait([receiving, self._communicator.Isend([mine, MPI.BYTE], self._rank, _WORD)])

    def median_s(self, once: Callable[[], float], share_s: float) -> float:
        """Median over repeats that take about ``share_s`` together; this rank's own times."""
        for _ in range(WARM_UP):
            start = perf_counter()
            once()
        return repeated(once, self.agree(repeats(perf_counter() - start, share_s)))


class Session:
    """The ranks that measure together.

    Args:
        communicator: of its own, so that no other message can match.
    """

    def __init__(self, communicator: MPI.Comm) -> None:
        self._world = communicator
        self.rank = communicator.rank

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on all ranks."""
        found: list[T] = self._world.allgather(value)
        return found

    def pair(self, pair: Pair, work: Callable[[Peer], T]) -> T:
        """What ``work`` gives on the first of two ranks."""
        first, second = pair
        found: Any = None
        barrier(self._world)
        if self.rank in pair:
            other = second if self.rank == first else first
            found = work(Peer(self._world, other, first=self.rank == first))
        barrier(self._world)
        result: T = self._world.bcast(found, root=first)
        return result

    def group(self, ranks: list[int], work: Callable[[MPI.Comm], T]) -> T:
        """What ``work`` gives on the first of some ranks, which have a communicator for it."""
        barrier(self._world)
        inside = self.rank in ranks
        order = ranks.index(self.rank) if inside else 0
        communicator = self._world.Split(0 if inside else MPI.UNDEFINED, order)
        found: Any = None
        if inside:
            found = work(communicator)
            communicator.Free()
        barrier(self._world)
        result: T = self._world.bcast(found, root=ranks[0])
        return result


def repeats(once_s: float, share_s: float) -> int:
    """How often to repeat what takes ``once_s``."""
    return int(min(MOST, max(FEWEST, share_s / max(once_s, 1e-7))))


def repeated(once: Callable[[], float], times: int) -> float:
    """Median of what ``once`` returns."""
    return median([once() for _ in range(times)])
