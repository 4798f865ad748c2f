"""Waiting without spinning: MPI's own waits keep a core busy, which a rank beside may need.

A rank that shares its cores with no other spins nonetheless: it sees at once what it waits for.

Many MPIs move a large message only within their own calls, one fragment a call. A wait that sleeps
after every call would then slow the message down; so it sleeps only after calls that moved
nothing. Which ones these are shows in the processor time they take: about a microsecond, against
five and more for a fragment.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_FIRST_SPIN_S = 100e-6
_SPIN_S = 20e-6
_SHORT_PAUSE_S = 50e-6
_LONG_PAUSE_S = 250e-6
_SHORT_S = 2e-3
_WORK_FACTOR = 3.0
_WORK_MARGIN_S = 1e-6
_FORGETS_S = 1e-10
"""By which every call makes the quietest one longer: clocks are wrong once in a while."""
_NEWEST = 0.3
"""Weight of the newest step in what is said of the last few."""


class WorkMeter:
    """Tells calls of MPI that moved data from calls that found nothing to do."""

    def __init__(self) -> None:
        self._quietest_s = math.inf

    def worked(self, cpu_s: float) -> bool:
        """Whether a call that took ``cpu_s`` of processor time did more than look."""
        self._quietest_s = min(self._quietest_s + _FORGETS_S, cpu_s)
        return cpu_s > _WORK_FACTOR * self._quietest_s + _WORK_MARGIN_S


_meter = WorkMeter()


@dataclass
class _Waited:
    """Seconds this process has spent in waits, who is told that it waits, and whether it spins."""

    total_s: float = 0.0
    tell: Callable[[bool], None] = lambda _: None
    spins: bool = False


_waited = _Waited()


class WaitingShare:
    """The part of its time that this process waits for others, over the last few steps.

    Whoever waits least is whom the others wait for.
    """

    def __init__(self) -> None:
        self._mean = math.nan
        self.restart()

    def restart(self) -> None:
        """Leave out what was since the last step."""
        self._since, self._waited_s = time.perf_counter(), _waited.total_s

    def share(self) -> float:
        """At the end of a step: from 0 to 1; older steps count less."""
        since, before_s = self._since, self._waited_s
        self.restart()
        elapsed_s = self._since - since
        share = (self._waited_s - before_s) / elapsed_s if elapsed_s else 0.0
        last = share if math.isnan(self._mean) else self._mean
        self._mean = last + _NEWEST * (share - last)
        return self._mean


def tell_of_waits(tell: Callable[[bool], None]) -> None:
    """Have somebody told when a wait begins to take longer, and when it is over."""
    _waited.tell = tell


def spin_if_alone(communicator: MPI.Comm, node: object) -> None:
    """Have waits of this process spin, if it has cores of its own. Collective.

    These are two at least that no other rank of the node may use: one waits, and threads of the
    process go on with messages and checkpoints on the other.

    Args:
        node: of this rank.
    """
    mine = frozenset(os.sched_getaffinity(0))
    everyone = gather_all(communicator, (node, mine))
    del everyone[communicator.rank]
    shared = any(other == node and mine & cores for other, cores in everyone)
    _waited.spins = len(mine) > 1 and not shared


def wait(requests: Sequence[MPI.Request]) -> None:
    """Return when all requests are complete."""
    from mpi4py import MPI  # importing it starts MPI, which profiling must not

    pending = list(requests)
    poll(lambda: bool(MPI.Request.Testall(pending)), _meter.worked)


def barrier(communicator: MPI.Comm) -> None:
    """Return when all ranks have come here."""
    wait([communicator.Ibarrier()])


def gather_all(communicator: MPI.Comm, value: T) -> list[T]:
    """The values of all ranks, on all ranks.

    As with every wait here, who waits for the last rank leaves its core to others, and says that it
    waits; MPI's own collectives do neither.
    """
    barrier(communicator)
    values: list[T] = communicator.allgather(value)
    return values


def broadcast(communicator: MPI.Comm, value: T, root: int = 0) -> T:
    """One rank's value, on all ranks; waits as :func:`gather_all`."""
    barrier(communicator)
    received: T = communicator.bcast(value, root)
    return received


@contextmanager
def waiting() -> Iterator[None]:
    """Say that this process waits, in calls that cannot be polled."""
    start = time.perf_counter()
    _waited.tell(True)
    try:
        yield
    finally:
        _waited.total_s += time.perf_counter() - start
        _waited.tell(False)


def poll(done: Callable[[], bool], worked: Callable[[float], bool]) -> None:
    """Call ``done`` until it says so: eagerly at first and as long as it works, else with pauses.

    So a short wait costs no latency, and a long one leaves the core to a rank that computes, unless
    there is none (:func:`spin_if_alone`).

    Args:
        worked: whether a call that took so many seconds of processor time moved data.
    """
    start = time.perf_counter()
    spin_until = long_from = start + _FIRST_SPIN_S
    has_told = False
    while not done():  # no pause is near: what calls move need not be known
        if time.perf_counter() >= spin_until:
            break
        os.sched_yield()
    else:
        _waited.total_s += time.perf_counter() - start
        return
    while True:
        before_s = time.thread_time()
        if done():
            _waited.total_s += time.perf_counter() - start
            if has_told:
                _waited.tell(False)
            return
        moved = worked(time.thread_time() - before_s)
        now = time.perf_counter()
        if now >= long_from and not has_told:
            _waited.tell(True)
            has_told = True
        if moved:
            spin_until = max(spin_until, now + _SPIN_S)
        if now < spin_until or _waited.spins:
            os.sched_yield()
        else:
            time.sleep(_SHORT_PAUSE_S if now - start < _SHORT_S else _LONG_PAUSE_S)
