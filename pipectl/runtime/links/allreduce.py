"""Sums over ranks, by their number and the size of the vector."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
from mpi4py import MPI

from pipectl.runtime.links.session import FEWEST, WARM_UP, repeated, repeats
from pipectl.runtime.waiting import wait

SIZES = (4 * 2**10, 256 * 2**10, 4 * 2**20, 32 * 2**20)
"""Bytes of float32."""


def rank_counts(ranks: int) -> list[int]:
    """2, 4, 8 and so on, and all."""
    return sorted({*(1 << power for power in range(1, ranks.bit_length())), ranks})


def times_by_size(
    communicator: MPI.Comm, budget_s: float, sizes: Sequence[int] = SIZES
) -> list[tuple[int, float]]:
    """Time of a float32 sum over all ranks of the communicator, the slowest rank's, in seconds.

    The first size is always measured, the others as long as the budget allows.
    """
    end = perf_counter() + budget_s
    found: list[tuple[int, float]] = []
    for index, size in enumerate(sizes):
        left_s = end - perf_counter()
        next_s = found[-1][1] * size / sizes[index - 1] if found else 0.0
        if not communicator.bcast(next_s * (WARM_UP + FEWEST) < left_s or not found):
            break
        found.append((size, _sum_s(communicator, size, left_s / (len(sizes) - index))))
    return found


def _sum_s(communicator: MPI.Comm, size: int, share_s: float) -> float:
    mine = np.ones(size // 4, dtype=np.float32)
    total = np.empty_like(mine)

    def once() -> float:
        start = perf_counter()
        wait([communicator.Iallreduce(mine, total, op=MPI.SUM)])
        return perf_counter() - start

    for _ in range(WARM_UP):
        start = perf_counter()
        once()
    times = communicator.bcast(repeats(perf_counter() - start, share_s))
    slowest_s: float = communicator.allreduce(repeated(once, times), op=MPI.MAX)
    return slowest_s
