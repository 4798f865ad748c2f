"""One clock for all ranks: that of rank 0, as each of them estimates it.

Processes of one machine share the system's monotonic clock, so one rank of each machine compares
its own with rank 0's: of many short messages there and back, the fastest tells best, and its middle
is taken for the moment at which the other side read its clock. The error is at most half of that
fastest time, as long as the clocks do not drift; they do by up to about 50 us a second, so whoever
needs them later agrees anew. (Cristian, "Probabilistic clock synchronization", 1989.)
"""

from __future__ import annotations

import socket
import zlib
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from pipectl.runtime.waiting import wait

TRIPS = 30
TAG = 1
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
Figures = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CommonClock:
    """Seconds of rank 0's monotonic clock.

    Args:
        offset_s: to add to this rank's own.
        error_s: most that the offset is wrong by.
    """

    offset_s: float = 0.0
    error_s: float = 0.0

    def __call__(self) -> float:
        """Now."""
        return perf_counter() + self.offset_s


def agree(communicator: MPI.Comm) -> CommonClock:
    """The common clock, for this rank. Collective; takes about ``TRIPS`` short messages a machine.

    Args:
        communicator: on which nothing else with this ``TAG`` is on its way.
    """
    machines = _gathered(communicator, float(_machine())).tolist()
    leaders = [machines.index(machine) for machine in dict.fromkeys(machines)]
    mine = np.zeros(2)
    for leader in leaders[1:]:
        if communicator.rank == leader:
            mine[:] = _compare(communicator)
        elif communicator.rank == 0:
            _answer(communicator, leader)
    offsets = _gathered(communicator, float(mine[0]))
    errors = _gathered(communicator, float(mine[1]))
    leader = machines.index(machines[communicator.rank])
    return CommonClock(float(offsets[leader]), float(errors[leader]))


def estimate(trips: Figures) -> tuple[float, float]:
    """Offset of the other clock, and its error, from messages there and back.

    Args:
        trips: sent and back by this clock, and in between by the other; shape [trips, 3] in the
            order sent, other, back.
    """
    sent, other, back = trips[np.argmin(trips[:, 2] - trips[:, 0])]
    return float(other - (sent + back) / 2), float((back - sent) / 2)


def _compare(communicator: MPI.Comm) -> tuple[float, float]:
    """The side that asks."""
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


def _gathered(communicator: MPI.Comm, value: float) -> Figures:
    values = np.empty(communicator.size)
    wait([communicator.Iallgather(np.array([value]), values)])
    return values


def _machine() -> int:
    """Names the clock that this process reads."""
    try:
        name = f"{_BOOT.read_text()}{_NAMESPACE.readlink()}"
    except OSError:
        name = socket.gethostname()
    return zlib.crc32(name.encode())
