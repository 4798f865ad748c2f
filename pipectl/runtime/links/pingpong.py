"""Messages between two ranks that nobody disturbs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter

import numpy as np

from pipectl.runtime.links.session import FEWEST, WARM_UP, Bytes, Peer
from pipectl.runtime.waiting import wait

SIZES = tuple(4**power for power in range(14))
"""1 B to 64 MiB."""


def times_by_size(
    peer: Peer, budget_s: float, sizes: Sequence[int] = SIZES
) -> list[tuple[int, float]]:
    """Half a round trip of every size, in seconds, as long as the budget allows.

    The first two sizes are always measured.
    """
    end = perf_counter() + budget_s
    found: list[tuple[int, float]] = []
    for index, size in enumerate(sizes):
        left_s = end - perf_counter()
        next_s = 2 * found[-1][1] * size / sizes[index - 1] if found else 0.0
        if not peer.agree(index < 2 or next_s * (WARM_UP + FEWEST) < left_s):
            break
        once = partial(_half_trip, peer, _buffer(size), _buffer(size))
        found.append((size, peer.median_s(once, left_s / (len(sizes) - index))))
    return found


def _half_trip(peer: Peer, sent: Bytes, received: Bytes) -> float:
    """The receive is posted ahead, as in training; the second rank answers when it has all."""
    start = perf_counter()
    receiving = peer.receive(received)
    if peer.first:
        wait([receiving, peer.send(sent)])
    else:
        wait([receiving])
        wait([peer.send(sent)])
    return (perf_counter() - start) / 2


def _buffer(size: int) -> Bytes:
    """Memory that is there: pages of zeros might not be."""
    return np.ones(size, dtype=np.uint8)
