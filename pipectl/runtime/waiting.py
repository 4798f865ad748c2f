"""Waiting for MPI without spinning, so that other ranks can use the core.

A wait begins without pauses, because most are short. A rank that shares its cores with no other
makes none at all, because it then sees messages at once. Where ranks outnumber cores, a wait begins
with a pause: a rank that gives up its core without sleeping gets it back only after a whole time
slice of another, which is longer than most waits.

Many MPIs move a large message only within their own calls, one fragment per call. A wait that
sleeps after every call would slow the message down, so it sleeps only after calls that moved no
data. These are identified by their processor time: about a microsecond, against five or more for a
fragment.
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
"""Seconds by which every call raises the minimum, since clocks are occasionally wrong."""
_NEWEST = 0.3
"""Weight of the newest step in the average over the last few."""


class WorkMeter:
    """Distinguishes MPI calls that moved data from calls that found nothing to do."""

    def __init__(self) -> None:
        self._quietest_s = math.inf

    def worked(self, cpu_s: float) -> bool:
        """Whether a call with ``cpu_s`` of processor time did more than look."""
        self._quietest_s = min(self._quietest_s + _FORGETS_S, cpu_s)
        return cpu_s > _WORK_FACTOR * self._quietest_s + _WORK_MARGIN_S


_meter = WorkMeter()


@dataclass
class _Waited:
    """How this process waits.

    Args:
        total_s: seconds that it has waited.
        tell: callback for waits.
        spin_s: seconds without pauses at the beginning of a wait.
        look: called again and again in waits; an exception of it ends them.
    """

    total_s: float = 0.0
    tell: Callable[[bool], None] = lambda _: None
    spin_s: float = _FIRST_SPIN_S
    look: Callable[[], None] | None = None


_waited = _Waited()


class WaitingShare:
    """The share of its time that this process waits for others, over the last few steps.

    The others wait for the rank with the smallest share.
    """

    def __init__(self) -> None:
        self._mean = math.nan
        self.restart()

    def restart(self) -> None:
        """Ignore the time since the last step."""
        self._since, self._waited_s = time.perf_counter(), _waited.total_s

    def share(self) -> float:
        """The share at the end of a step, from 0 to 1; older steps count less."""
        since, before_s = self._since, self._waited_s
        self.restart()
        elapsed_s = self._since - since
        share = (self._waited_s - before_s) / elapsed_s if elapsed_s else 0.0
        last = share if math.isnan(self._mean) else self._mean
        self._mean = last + _NEWEST * (share - last)
        return self._mean


def tell_of_waits(tell: Callable[[bool], None]) -> None:
    """Call ``tell`` when a wait begins to take longer, and when it ends."""
    _waited.tell = tell


def choose_spin(communicator: MPI.Comm, node: object) -> None:
    """Choose how long waits of this process spin, by the cores of all ranks. Collective.

    To spin without end, a rank needs at least two cores that no other rank of the node may use: one
    for the wait, the other for the process's threads for messages and checkpoints. If it and the
    ranks that may use its cores outnumber all of their cores, it does not spin.

    Args:
        node: of this rank.
    """
    mine = frozenset(os.sched_getaffinity(0))
    everyone = gather_all(communicator, (node, mine))
    del everyone[communicator.rank]
    sharing = [cores for other, cores in everyone if other == node and mine & cores]
    if 1 + len(sharing) > len(mine.union(*sharing)):
        _waited.spin_s = 0.0
    elif len(mine) > 1 and not sharing:
        _waited.spin_s = math.inf


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

    Like all waits here, and unlike MPI's own collectives, it leaves the core to others while it
    waits for the last rank, and reports that it waits.
    """
    barrier(communicator)
    values: list[T] = communicator.allgather(value)
    return values


def broadcast(communicator: MPI.Comm, value: T, root: int = 0) -> T:
    """One rank's value, on all ranks; waits like :func:`gather_all`."""
    barrier(communicator)
    received: T = communicator.bcast(value, root)
    return received


@contextmanager
def waiting() -> Iterator[None]:
    """Report that this process waits, in calls that cannot be polled."""
    start = time.perf_counter()
    _waited.tell(True)
    try:
        yield
    finally:
        _waited.total_s += time.perf_counter() - start
        _waited.tell(False)


@contextmanager
def interrupted(look: Callable[[], None]) -> Iterator[None]:
    """In this block, call ``look`` again and again during waits; what it raises ends them."""
    _waited.look = look
    try:
        yield
    finally:
        _waited.look = None
        _waited.tell(False)  # a wait that was ended has not said so


def poll(done: Callable[[], bool], worked: Callable[[float], bool] = lambda _: False) -> None:
    """Call ``done`` until it returns True, without pauses at first and while it moves data.

    So a short wait has no latency, and a long one leaves the core to a rank that computes, if there
    is one; :func:`choose_spin` decides when pauses begin.

    Args:
        worked: whether a call with this many seconds of processor time moved data; by default, none
            does.
    """
    start = time.perf_counter()
    spin_until, long_from = start + _waited.spin_s, start + _FIRST_SPIN_S
    if _spin(done, min(spin_until, long_from)):
        _waited.total_s += time.perf_counter() - start
        return
    has_told, look = False, _waited.look
    while True:
        before_s = time.thread_time()
        if done():
            _waited.total_s += time.perf_counter() - start
            if has_told:
                _waited.tell(False)
            return
        moved = worked(time.thread_time() - before_s)
        if look is not None:
            look()
        now = time.perf_counter()
        if now >= long_from and not has_told:
            _waited.tell(True)
            has_told = True
        if moved:
            spin_until = max(spin_until, now + _SPIN_S)
        if now < spin_until:
            os.sched_yield()
        else:
            time.sleep(_SHORT_PAUSE_S if now - start < _SHORT_S else _LONG_PAUSE_S)


def _spin(done: Callable[[], bool], until: float) -> bool:
    """Call ``done`` without pauses until it returns True, or until a time; returns which.

    No pause follows soon, so calls need not be measured.
    """
    look = _waited.look
    while not done():
        if look is not None:
            look()
        if time.perf_counter() >= until:
            return False
        os.sched_yield()
    return True
