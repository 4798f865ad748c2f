"""How much of a message is hidden while both of its ranks compute, without and with help.

Many MPIs move large messages only inside their own calls. A rank that computes meanwhile makes no
such call, unless it polls. What counts is when both the work and the message are done: where the
receiver's processor copies the message, polls take as long from the work as they save from the
wait, and hide nothing.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
from mpi4py import MPI

from pipectl.runtime.links.session import WARM_UP, Bytes, Peer
from pipectl.runtime.waiting import wait

SIZES = (2**20, 16 * 2**20)
REPEATS = 7
"""The fastest counts: disturbances only ever make it slower."""
COMPUTE = 2.0
"""Time of the computation, in times of the message."""
COST = (WARM_UP + REPEATS) * (3 * COMPUTE + 3)
"""Most that measuring takes, in times of the message."""
_ORDER = 96  # a product of matrices of this order is an operator of some ten microseconds
_PRODUCTS = 50
"""Of which the time of one is taken."""


def hidden(peer: Peer, size: int) -> tuple[float, float]:
    """The hidden share of a message's time, plain and polled, each between 0 and 1.

    The first rank receives; it is the one that waits for what was not hidden. All kinds of trials
    are made in turn, so that all meet the same disturbances.
    """
    buffer = np.ones(size, dtype=np.uint8)
    _multiply(_PRODUCTS, None)
    start = perf_counter()
    _multiply(_PRODUCTS, None)
    product_s = (perf_counter() - start) / _PRODUCTS
    alone_s = min(_taken_s(peer, buffer, 0, polled=False) for _ in range(WARM_UP + 1))
    products = peer.agree(1 + int(COMPUTE * alone_s / product_s))
    times = [
        (
            _taken_s(peer, buffer, 0, polled=False),
            _taken_s(peer, None, products, polled=False),
            _taken_s(peer, buffer, products, polled=False),
            _taken_s(peer, buffer, products, polled=True),
        )
        for _ in range(WARM_UP + REPEATS)
    ]
    message_s, work_s, plain_s, polled_s = (min(column) for column in zip(*times, strict=True))
    plain, polled = (1.0 - (both_s - work_s) / message_s for both_s in (plain_s, polled_s))
    return min(1.0, max(0.0, plain)), min(1.0, max(0.0, polled))


def _taken_s(peer: Peer, buffer: Bytes | None, products: int, *, polled: bool) -> float:
    """Time until this rank has computed and its message, if there is any, has left or arrived."""
    receiving = peer.receive(buffer) if buffer is not None and peer.first else None
    peer.meet()
    start = perf_counter()
    requests = [] if buffer is None else [receiving or peer.send(buffer)]
    _multiply(products, requests[0] if polled else None)
    wait(requests)
    return perf_counter() - start


def _multiply(products: int, request: MPI.Request | None) -> None:
    """Multiply matrices; with a request, let MPI work between two products."""
    matrix = np.ones((_ORDER, _ORDER), dtype=np.float32)
    product = np.empty_like(matrix)
    for _ in range(products):
        np.matmul(matrix, matrix, out=product)
        if request is not None:
            request.Test()
