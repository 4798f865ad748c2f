"""Sums over ranks as the training makes them, by the number of ranks and the size of the vector."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from pipectl.plan.sums import BUCKET_BYTES, ROUNDS, parts_of_bucket
from pipectl.runtime.links.session import FEWEST, WARM_UP, repeated, repeats
from pipectl.runtime.waiting import barrier, wait

SIZES = (4 * 2**10, 256 * 2**10, 4 * 2**20, 32 * 2**20)
"""Bytes of float32."""
Floats = npt.NDArray[np.float32]


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
    summed = Sum(communicator, np.ones(size // 4, dtype=np.float32))

    def once() -> float:
        barrier(communicator)
        start = perf_counter()
        summed.run()
        return perf_counter() - start

    for _ in range(WARM_UP):
        start = perf_counter()
        once()
    times = communicator.bcast(repeats(perf_counter() - start, share_s))
    slowest_s: float = communicator.allreduce(repeated(once, times), op=MPI.MAX)
    return slowest_s


class Sum:
    """A vector that ranks sum, bucket by bucket; each becomes its mean, so that it never grows.

    Args:
        gradients: takes the place of those of a stage.
    """

    def __init__(self, communicator: MPI.Comm, gradients: Floats) -> None:
        step = BUCKET_BYTES // 4
        self._buckets = [
            _Bucket(communicator, gradients[start : start + step], ROUNDS * index)
            for index, start in enumerate(range(0, len(gradients), step))
        ]

    def run(self) -> None:
        """Send, add up and receive as :class:`pipectl.runtime.reduction.StageReduction` does."""
        for bucket in self._buckets:
            bucket.start()
        for bucket in self._buckets:
            bucket.add_up()
        for bucket in self._buckets:
            bucket.finish()


class _Bucket:
    """A part of the vector that travels together; see :mod:`pipectl.plan.sums`."""

    def __init__(self, communicator: MPI.Comm, gradients: Floats, tag: int) -> None:
        self._communicator, self._tag = communicator, tag
        self._gradients, self._flat = gradients, np.empty_like(gradients)
        parts = parts_of_bucket(len(gradients), communicator.size)
        self._parts = [self._flat[part.start : part.stop] for part in parts]
        self._own = self._parts[communicator.rank]
        self._others = [rank for rank in range(communicator.size) if rank != communicator.rank]
        self._arriving = {rank: np.empty_like(self._own) for rank in self._others}
        self._sums = {rank: np.empty_like(self._parts[rank]) for rank in self._others}
        self._receiving: list[MPI.Request] = []
        self._requests: list[MPI.Request] = []

    def start(self) -> None:
        """Send the others their parts, and receive one's own."""
        np.copyto(self._flat, self._gradients)
        self._receiving, self._requests = [], []
        for rank in self._others:
            self._receiving.append(self._receive(self._arriving[rank], rank, self._tag))
            self._requests.append(self._send(self._parts[rank], rank, self._tag))

    def add_up(self) -> None:
        """Add up one's own part once all have sent it, and send the result to all."""
        wait(self._receiving)
        for part in self._arriving.values():
            self._own += part
        self._own /= self._communicator.size
        for rank in self._others:
            self._requests.append(self._receive(self._sums[rank], rank, self._tag + 1))
            self._requests.append(self._send(self._own, rank, self._tag + 1))

    def finish(self) -> None:
        """Take in the results of all others."""
        wait(self._requests)
        for rank, part in self._sums.items():
            np.copyto(self._parts[rank], part)
        np.copyto(self._gradients, self._flat)

    def _send(self, part: Floats, rank: int, tag: int) -> MPI.Request:
        return self._communicator.Isend([part, MPI.FLOAT], rank, tag)

    def _receive(self, part: Floats, rank: int, tag: int) -> MPI.Request:
        return self._communicator.Irecv([part, MPI.FLOAT], rank, tag)
