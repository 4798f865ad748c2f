"""One rank of the overlap benchmark: ``python -m mpi4py overlap.py BYTES``."""

from __future__ import annotations

import sys
import time
from statistics import median

import numpy as np
import torch
from mpi4py import MPI

from pipectl.runtime.transport import Circumstances, Progress, choose_progress
from pipectl.runtime.transport.choice import HELPED, STAGED
from pipectl.runtime.transport.transfer import WHOLE, Pieces, Transfer
from pipectl.runtime.waiting import barrier

REPEATS = 5
SKEW = 0.25
"""Part of a message's time by which the second rank starts later."""
WAYS = (
    ("none", WHOLE, "nothing"),
    ("poll", HELPED, "polling between operators"),
    ("thread", WHOLE, "thread, messages whole"),
    ("thread", STAGED, "thread, pieces of 4 MiB"),
    ("thread", HELPED, "thread, 1 MiB, 4 at a time"),
)


class Rank:
    """One of the two ranks."""

    def __init__(self, size: int) -> None:
        self.world = MPI.COMM_WORLD
        self.size = size
        self.buffers = [torch.ones(size, dtype=torch.uint8) for _ in range(2)]
        self.matrix = np.ones((192, 192), dtype=np.float32)
        self.product = np.empty_like(self.matrix)
        with Progress() as nobody:
            self.multiply(50, nobody)
            self.product_s = self.multiply(200, nobody) / 200
            alone = [self.exchange(nobody, 0, 0.0, both=False)[1] for _ in range(3)]
        self.alone_s = self.world.bcast(median(alone), 0)
        self.products = int(self.world.bcast(2 * self.alone_s / self.product_s, 0))

    def multiply(self, times: int, progress: Progress) -> float:
        """Work; its time in seconds."""
        start = time.perf_counter()
        for _ in range(times):
            np.matmul(self.matrix, self.matrix, out=self.product)
            if progress.mode == "poll":
                progress.tick()
        return time.perf_counter() - start

    def exchange(
        self, progress: Progress, products: int, late_s: float, *, both: bool
    ) -> tuple[float, float, float]:
        """Times of the work and of the wait behind it, and processor time beside the work."""
        barrier(self.world)
        if self.world.rank and late_s:
            self.multiply(int(late_s / self.product_s), progress)
        transfers = self.start(progress, both=both)
        beside_s = time.process_time() - time.thread_time()
        worked_s = self.multiply(products, progress)
        beside_s = time.process_time() - time.thread_time() - beside_s
        start = time.perf_counter()
        progress.wait(transfers)
        return worked_s, time.perf_counter() - start, beside_s

    def start(self, progress: Progress, *, both: bool) -> list[Transfer]:
        """The first rank's message; with ``both`` the second's, too."""
        world, other = self.world, 1 - self.world.rank
        received, sent = self.buffers
        transfers = []
        if both or world.rank:
            transfers.append(progress.begin(world.Irecv, received, other, 1, lambda: "a message"))
        if both or not world.rank:
            transfers.append(progress.begin(world.Isend, sent, other, 1))
        return transfers

    def figures(
        self, mode: str, pieces: Pieces, late: float, *, both: bool
    ) -> tuple[float, float, float, float]:
        """A row of the table, the worse rank's."""
        with Progress(mode, pieces) as progress:
            idle = [self.exchange(progress, 0, 0.0, both=both)[1] for _ in range(4)]
            late_s = late * self.alone_s
            found = [
                self.exchange(progress, self.products, late_s, both=both) for _ in range(REPEATS)
            ]
        worked, waited, beside = (median(column) for column in zip(*found, strict=True))
        lost = worked - self.products * self.product_s
        mine = (median(idle[1:]), waited, lost, beside)
        a, b, c, d = (self.world.allreduce(v / self.alone_s, op=MPI.MAX) for v in mine)
        return a, b, c, d


def work(size: int) -> None:
    """All experiments; rank 0 prints."""
    rank = Rank(size)
    rows = []
    for what, both, late in (
        ("one way", False, 0.0),
        ("both ways", True, 0.0),
        ("both ways, one later", True, SKEW),
    ):
        for mode, pieces, name in WAYS:
            figures = rank.figures(mode, pieces, late, both=both)
            rows.append((what, name, *(f"{value:.2f}" for value in figures)))
    choice = choose_progress(rank.world, "auto", Circumstances([1, 1], size))
    if rank.world.rank == 0:
        say(rank.alone_s, rows, f"{choice.mode}: {choice.why}")


def say(alone_s: float, rows: list[tuple[str, ...]], chosen: str) -> None:
    print(f"The message alone: {1e3 * alone_s:.1f} ms. Chosen by `auto`: {chosen}.\n")
    print(
        "| messages | help | without work | wait after the work | slowdown of the work | "
        "processor time of the thread |"
    )
    print("|---|---|---|---|---|---|")
    for row in rows:
        print("|", " | ".join(row), "|")


if __name__ == "__main__":
    work(int(sys.argv[1]))
