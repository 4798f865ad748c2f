"""How much of a message is hidden while both of its ranks compute.

Many MPIs move large messages only inside their own calls. A rank that computes meanwhile makes no
such call, unless it polls.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
from mpi4py import MPI

from pipectl.runtime.links.session import WARM_UP, Bytes, Peer, repeated
from pipectl.runtime.waiting import wait

SIZES = (2**20, 16 * 2**20)
REPEATS = 5
COMPUTE = 2.0
"""Time of the computation, in times of the message."""
COST = 2 * (WARM_UP + REPEATS) * (COMPUTE + 1)
"""Most that measuring takes, in times of the message."""
_ORDER = 96  # a product of matrices of this order is an operator of some ten microseconds


def hidden(peer: Peer, size: int) -> tuple[float, float]:
    """The hidden share of a message's time, plain and polled, each between 0 and 1.

    The first rank receives; it is the one that waits for what was not hidden.
    """
    buffer = np.ones(size, dtype=np.uint8)
    alone_s = _median_s(peer, buffer, 0.0, polled=False)
    compute_s = COMPUTE * peer.agree(int(alone_s * 1e9)) / 1e9
    plain, polled = (
        1.0 - _median_s(peer, buffer, compute_s, polled=polled) / alone_s
        for polled in (False, True)
    )
    return min(1.0, max(0.0, plain)), min(1.0, max(0.0, polled))


def _median_s(peer: Peer, buffer: Bytes, compute_s: float, *, polled: bool) -> float:
    for _ in range(WARM_UP):
        _waited_s(peer, buffer, compute_s, polled=polled)
    return repeated(lambda: _waited_s(peer, buffer, compute_s, polled=polled), REPEATS)


def _waited_s(peer: Peer, buffer: Bytes, compute_s: float, *, polled: bool) -> float:
    """Time this rank waits for the message after it has computed, in seconds."""
    receiving = peer.receive(buffer) if peer.first else None
    peer.meet()
    request = receiving or peer.send(buffer)
    _compute(compute_s, request if polled else None)
    start = perf_counter()
    wait([request])
    return perf_counter() - start


def _compute(time_s: float, request: MPI.Request | None) -> None:
    """Multiply matrices; with a request, let MPI work between two products."""
    matrix = np.ones((_ORDER, _ORDER), dtype=np.float32)
    product = np.empty_like(matrix)
    end = perf_counter() + time_s
    while perf_counter() < end:
        np.matmul(matrix, matrix, out=product)
        if request is not None:
            request.Test()
