"""What messages that travel at once do to each other: both ways, and from all ranks of a node."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from mpi4py import MPI

from pipectl.runtime.links.session import WARM_UP, Bytes, Peer
from pipectl.runtime.waiting import barrier, wait

REPEATS = 9
"""The fastest counts: a ratio of two medians would carry the disturbances of both."""
_TAG = 1


def both_ways(peer: Peer, size: int) -> float:
    """Time in which two ranks send each other ``size`` bytes at once, over that of one direction.

    The two are measured in turn, so that both meet the same disturbances.
    """
    sent, received = (np.ones(size, dtype=np.uint8) for _ in range(2))
    times = [
        [_until_all_is_there_s(peer, sent, received, both=kind) for kind in (False, True)]
        for _ in range(WARM_UP + REPEATS)
    ]
    one_s, both_s = (min(row[kind] for row in times[WARM_UP:]) for kind in (0, 1))
    return both_s / one_s


def _until_all_is_there_s(peer: Peer, sent: Bytes, received: Bytes, *, both: bool) -> float:
    """From the start of the sends until both ranks have all; the second sends only if ``both``."""
    sends, receives = peer.first or both, not peer.first or both
    requests = [peer.receive(received)] if receives else []
    peer.meet()
    start = perf_counter()
    wait([*requests, peer.send(sent)] if sends else requests)
    peer.meet()
    return perf_counter() - start


def one_way_s(communicator: MPI.Comm, size: int) -> float:
    """Time until the slowest of several pairs has sent ``size`` bytes, in seconds.

    The first half of the ranks sends to the second half, rank by rank. Both ends would take turns
    in a ping-pong, and two pairs could evade each other.
    """
    pairs = communicator.size // 2
    sends = communicator.rank < pairs
    other = communicator.rank + (pairs if sends else -pairs)
    buffer = np.ones(size, dtype=np.uint8)

    def once() -> float:
        request = None if sends else communicator.Irecv([buffer, MPI.BYTE], other, _TAG)
        barrier(communicator)
        start = perf_counter()
        wait([request or communicator.Isend([buffer, MPI.BYTE], other, _TAG)])
        barrier(communicator)
        return perf_counter() - start

    once()
    return min(once() for _ in range(REPEATS))
