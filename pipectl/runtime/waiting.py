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

    Polls, first eagerly and then with growing pauses: a short wait costs no latency, a long one
    leaves the core to a rank that computes.

    Args:
        meanwhile: called between polls, to keep other transfers going.
    """
    pending = list(requests)
    start = time.perf_counter()
    while not MPI.Request.Testall(pending):
        waited_s = time.perf_counter() - start
        if waited_s < _SPIN_S:
            os.sched_yield()
            continue
        if meanwhile is not None:
            meanwhile()
        time.sleep(_SHORT_PAUSE_S if waited_s < _SHORT_S else _LONG_PAUSE_S)


def barrier(communicator: MPI.Comm) -> None:
    """Return when all ranks have come here."""
    wait([communicator.Ibarrier()])
