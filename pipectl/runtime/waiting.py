"""Waiting without spinning: MPI's own waits keep a core busy, which a rank beside may need."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from mpi4py import MPI

_SPIN_S = 100e-6
_SHORT_PAUSE_S = 50e-6
_LONG_PAUSE_S = 250e-6
_SHORT_S = 2e-3


def wait(requests: Sequence[MPI.Request], meanwhile: Callable[[], None] | None = None) -> None:
    """Return when all requests are complete.

    Args:
        meanwhile: called between polls, to keep other transfers going.
    """
    pending = list(requests)
    _poll(lambda: bool(MPI.Request.Testall(pending)), meanwhile)


def wait_for_message(
    communicator: MPI.Comm, rank: int, tag: int, meanwhile: Callable[[], None] | None = None
) -> int:
    """Return the size in bytes of a message from ``rank`` once it is there to be received."""
    status = MPI.Status()
    _poll(lambda: bool(communicator.Iprobe(rank, tag, status)), meanwhile)
    return int(status.Get_count(MPI.BYTE))


def barrier(communicator: MPI.Comm) -> None:
    """Return when all ranks have come here."""
    wait([communicator.Ibarrier()])


def _poll(done: Callable[[], bool], meanwhile: Callable[[], None] | None) -> None:
    """Poll eagerly at first, then with growing pauses.

    So a short wait costs no latency, and a long one leaves the core to a rank that computes.
    """
    start = time.perf_counter()
    while not done():
        waited_s = time.perf_counter() - start
        if waited_s < _SPIN_S:
            os.sched_yield()
            continue
        if meanwhile is not None:
            meanwhile()
        time.sleep(_SHORT_PAUSE_S if waited_s < _SHORT_S else _LONG_PAUSE_S)
