"""One clock for all ranks: that of rank 0, as each of them estimates it.

Processes of one machine share the system's monotonic clock, so only one rank per machine compares
its clock with rank 0's. Of many short round trips, the fastest is the most accurate; its midpoint
is taken for the time at which the other side read its clock. The error is at most half of that
fastest round trip, as long as the clocks do not drift. They drift by up to about 50 us per second,
so the comparison must be repeated for later use. (Cristian, "Probabilistic clock synchronization",
1989.)
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from pipectl.runtime.waiting import gather_all, wait

TRIPS = 30
TAG = 1
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
Figures = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CommonClock:
    """Seconds of rank 0's monotonic clock.

    Args:
        offset_s: added to this rank's own clock.
        error_s: maximum error of the offset.
    """

    offset_s: float = 0.0
    error_s: float = 0.0

    def __call__(self) -> float:
        """The current time."""
        return perf_counter() + self.offset_s


def common_clock(communicator: MPI.Comm) -> CommonClock:
    """This rank's common clock. Collective; sends about ``TRIPS`` short messages per machine.

    Args:
        communicator: on which no other messages have this ``TAG``.
    """
    machines = gather_all(communicator, machine())
    leaders = [machines.index(machine) for machine in dict.fromkeys(machines)]
    mine = 0.0, 0.0
    for leader in leaders[1:]:
        if communicator.rank == leader:
            mine = _compare(communicator)
        elif communicator.rank == 0:
            _answer(communicator, leader)
    leader = machines.index(machines[communicator.rank])
    return CommonClock(*gather_all(communicator, mine)[leader])


def estimate(trips: Figures) -> tuple[float, float]:
    """Offset of the other clock, and its error, from round trips.

    Args:
        trips: times of sending and return by this clock, and of the other clock in between; shape
            [trips, 3] in the order sent, other, back.
    """
    sent, other, back = trips[np.argmin(trips[:, 2] - trips[:, 0])]
    return float(other - (sent + back) / 2), float((back - sent) / 2)


def _compare(communicator: MPI.Comm) -> tuple[float, float]:
    """The side that sends the requests."""
    trips, word = np.zeros((TRIPS, 3)), np.zeros(1)
    for trip in trips:
        receiving = communicator.Irecv(word, 0, TAG)
        trip[0] = perf_counter()
        wait([receiving, communicator.Isend(np.zeros(1), 0, TAG)])
        trip[1:] = word[0], perf_counter()
    return estimate(trips)


def _answer(communicator: MPI.Comm, leader: int) -> None:
    word = np.zeros(1)
    for _ in range(TRIPS):
        wait([communicator.Irecv(word, leader, TAG)])
        word[0] = perf_counter()
        wait([communicator.Isend(word, leader, TAG)])


def machine() -> str:
    """Identifies the machine, and the clock that this process reads."""
    try:
        return f"{_BOOT.read_text()}{_NAMESPACE.readlink()}"
    except OSError:
        return socket.gethostname()
