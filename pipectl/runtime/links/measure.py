"""Measuring links, by MPI messages without torch, and sums, by those of the training.

One experiment runs at a time, while all other ranks wait without using their cores. Every rank gets
every result, so that all ranks decide alike without further messages.

As a program (``mpiexec -n 2 python -m mpi4py -m pipectl.runtime.links.measure``) it tests that two
ranks reach each other; rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from pipectl.lanes import BUCKET_BYTES
from pipectl.link import Link, Observed, Timings, measured_link
from pipectl.runtime.waiting import barrier, broadcast, wait

T = TypeVar("T")
Array = npt.NDArray[Any]
Table = list[tuple[int, float]]
"""(bytes, seconds) by rising bytes."""

PING_PONG_SIZES = tuple(4**power for power in range(14))
"""1 B to 64 MiB."""
SUM_SIZES = (4 * 2**10, 256 * 2**10, 4 * 2**20, 32 * 2**20)
"""Bytes of float32."""
OVERLAP_SIZES = (2**20, 16 * 2**20)
CONTENTION_BYTES = 4 * 2**20
"""Size of competing messages, if messages of this size were measured."""
FULL_DUPLEX = 1.5
"""Ratio of times below which both directions are independent: a shared link would give 2."""

WARM_UP = 2
MIN_REPEATS, MAX_REPEATS = 3, 300
TRIALS = 9
"""Repeats, of which the fastest counts: disturbances only make a repeat slower."""
COMPUTE = 2.0
"""Duration of the computation that a message overlaps, as a multiple of the message's time."""
OVERLAP_COST = (WARM_UP + TRIALS) * (3 * COMPUTE + 3)
"""Longest duration of an overlap experiment, as a multiple of the message's time."""
REACH_SIZES, REACH_S = (8, 8 << 20), 0.2
"""Of the messages that test whether two ranks reach each other."""
LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}
_MATRIX_ORDER = 96  # a product of matrices of this order is an operator of some ten microseconds


def run_on(communicator: MPI.Comm, ranks: Sequence[int], experiment: Callable[[MPI.Comm], T]) -> T:
    """Run an experiment on some ranks; returns the result of the first of them. Collective."""
    barrier(communicator)
    takes_part = communicator.rank in ranks
    color, key = (0, ranks.index(communicator.rank)) if takes_part else (MPI.UNDEFINED, 0)
    group = communicator.Split(color, key)
    mine: Any = None
    if takes_part:
        mine = experiment(group)
        group.Free()
    result: T = broadcast(communicator, mine, ranks[0])
    return result


def time_by_size(
    communicator: MPI.Comm,
    sizes: Sequence[int],
    budget_s: float,
    prepare: Callable[[int], Callable[[], float]],
    min_sizes: int,
) -> Table:
    """The slowest rank's median time for each size, until the budget is spent.

    Args:
        prepare: makes, for a size, a function that returns the seconds that it took.
        min_sizes: number of sizes to measure even if the budget is exceeded.
    """
    end = perf_counter() + budget_s
    table: Table = []
    for index, size in enumerate(sizes):
        left_s = end - perf_counter()
        expected_s = table[-1][1] * size / sizes[index - 1] if table else 0.0
        affordable = expected_s * (WARM_UP + MIN_REPEATS) < left_s
        if not broadcast(communicator, index < min_sizes or affordable):
            break
        once = prepare(size)
        for _ in range(WARM_UP):
            start = perf_counter()
            once()
        once_s = perf_counter() - start
        wanted = left_s / (len(sizes) - index) / max(once_s, 1e-7)
        repeats = broadcast(communicator, int(min(MAX_REPEATS, max(MIN_REPEATS, wanted))))
        mine = median([once() for _ in range(repeats)])
        table.append((size, max(communicator.allgather(mine))))
    return table


def _send(communicator: MPI.Comm, buffer: Array, rank: int) -> MPI.Request:
    return communicator.Isend([buffer.view(np.uint8), MPI.BYTE], rank)


def _receive(communicator: MPI.Comm, buffer: Array, rank: int) -> MPI.Request:
    return communicator.Irecv([buffer.view(np.uint8), MPI.BYTE], rank)


def measure_link(communicator: MPI.Comm, pairs: Sequence[tuple[int, int]], share_s: float) -> Link:
    """The link between some pairs, in about ``share_s`` seconds per pair, and once more."""
    tables = [run_on(communicator, pair, partial(ping_pong, budget_s=share_s)) for pair in pairs]
    link = measured_link(_mean(tables))
    size = min(CONTENTION_BYTES, link.timings[-1][0])
    ratio = run_on(communicator, pairs[0], partial(both_ways, size=size))
    overlap = tuple(
        (size, *run_on(communicator, pairs[0], partial(hidden_shares, size=size)))
        for size in overlap_sizes(link, share_s)
    )
    observed = Observed(both_ways=ratio, overlap=overlap)
    return replace(link, duplex=ratio < FULL_DUPLEX, observed=observed)


def measure_sharing(communicator: MPI.Comm, link: Link, nodes: Sequence[Sequence[int]]) -> Link:
    """The link between nodes, and whether the ranks of the first two nodes share it.

    On one link, ``n`` pairs take ``n`` times as long as one; on ``n`` links, as long as one. The
    threshold is the square root of ``n``.
    """
    pairs = min(len(nodes[0]), len(nodes[1]))
    if pairs < 2 or link.observed is None:
        return link
    size = min(CONTENTION_BYTES, link.timings[-1][0])
    alone_s, all_s = (
        run_on(communicator, [*nodes[0][:count], *nodes[1][:count]], partial(one_way_s, size=size))
        for count in (1, pairs)
    )
    ratio = all_s / alone_s
    observed = replace(link.observed, pairs=pairs, at_once=ratio)
    return replace(link, shared=ratio > sqrt(pairs), observed=observed)


def measure_sums(communicator: MPI.Comm, ranks: int, share_s: float) -> Table:
    """Time of a sum of float32 gradients over the first ``ranks`` ranks, by bytes of gradients."""
    import torch  # links do not need it

    from pipectl.runtime.device import CpuDevice
    from pipectl.runtime.reduction import StageReduction
    from pipectl.runtime.transport import Wire

    def prepare(communicator: MPI.Comm, size: int) -> Callable[[], float]:
        leaves = [
            torch.zeros(min(BUCKET_BYTES, size - start) // 4, requires_grad=True)
            for start in range(0, size, BUCKET_BYTES)
        ]
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)  # repeated sums of nonzero numbers would overflow
        named = {str(number): leaf for number, leaf in enumerate(leaves)}
        reduction = StageReduction(Wire(communicator, CpuDevice()), named)

        def once() -> float:
            barrier(communicator)
            start = perf_counter()
            reduction.start()
            reduction.finish()
            return perf_counter() - start

        return once

    return run_on(
        communicator,
        range(ranks),
        lambda group: time_by_size(group, SUM_SIZES, share_s, partial(prepare, group), 1),
    )


def overlap_sizes(link: Link, share_s: float) -> list[int]:
    """The sizes for which there is time; the largest measured one if that is smaller."""
    largest = link.timings[-1][0]
    sizes = [size for size in OVERLAP_SIZES if size <= largest] or [largest]
    return [s for s in sizes if s == sizes[0] or OVERLAP_COST * link.transfer_s(s) < share_s]


def _mean(tables: Sequence[Table]) -> Timings:
    return tuple(
        (rows[0][0], sum(time_s for _, time_s in rows) / len(rows))
        for rows in zip(*tables, strict=False)
    )


def ping_pong(
    communicator: MPI.Comm, budget_s: float, sizes: Sequence[int] = PING_PONG_SIZES
) -> Table:
    """Half a round trip between two otherwise idle ranks, in seconds, by size.

    The receive is posted ahead, as in training; the second rank answers after the whole message.
    """
    other = 1 - communicator.rank

    def prepare(size: int) -> Callable[[], float]:
        sent, received = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)

        def round_trip() -> float:
            start = perf_counter()
            receiving = _receive(communicator, received, other)
            if communicator.rank == 0:
                wait([receiving, _send(communicator, sent, other)])
            else:
                wait([receiving])
                wait([_send(communicator, sent, other)])
            return perf_counter() - start

        return round_trip

    table = time_by_size(communicator, sizes, budget_s, prepare, 2)
    return [(size, time_s / 2) for size, time_s in table]


def both_ways(communicator: MPI.Comm, size: int) -> float:
    """Time for two ranks to send each other ``size`` bytes, relative to that of one direction."""
    sent, received = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    one_s, both_s = _fastest(
        partial(_transfer_s, communicator, sent, received, both=False),
        partial(_transfer_s, communicator, sent, received, both=True),
    )
    return both_s / one_s


def one_way_s(communicator: MPI.Comm, size: int) -> float:
    """Time until the slowest of several pairs has sent ``size`` bytes, in seconds.

    In a ping-pong the two ends would take turns, and two pairs could avoid each other.
    """
    buffer = np.ones(size, dtype=np.uint8)
    (time_s,) = _fastest(partial(_transfer_s, communicator, buffer, buffer, both=False))
    return time_s


def _transfer_s(communicator: MPI.Comm, sent: Array, received: Array, *, both: bool) -> float:
    """Time until the first half of the ranks has sent to the second, and back if ``both``."""
    pairs = communicator.size // 2
    first = communicator.rank < pairs
    other = communicator.rank + (pairs if first else -pairs)
    receives = [] if first and not both else [_receive(communicator, received, other)]
    barrier(communicator)
    start = perf_counter()
    sends = [_send(communicator, sent, other)] if first or both else []
    wait([*receives, *sends])
    barrier(communicator)
    return perf_counter() - start


def hidden_shares(communicator: MPI.Comm, size: int) -> tuple[float, float]:
    """The share of a message's time that computing hides, without and with polls, from 0 to 1.

    Many MPIs move large messages only inside their own calls. A rank makes no such call while it
    computes, unless it polls. What counts is the time until both the work and the message are done:
    if the receiver's processor copies the message, polls take as much time from the work as they
    save in the wait, and hide nothing. The first rank receives; it waits for the rest of the
    message.
    """
    buffer = np.ones(size, dtype=np.uint8)
    _multiply(50)
    start = perf_counter()
    _multiply(50)
    product_s = (perf_counter() - start) / 50

    def trial(message: bool, products: int, polled: bool = False) -> float:
        """Time until this rank has computed and its message has left or arrived."""
        receives = [_receive(communicator, buffer, 1)] if message and communicator.rank == 0 else []
        barrier(communicator)
        start = perf_counter()
        requests = receives or ([_send(communicator, buffer, 0)] if message else [])
        _multiply(products, requests if polled else ())
        wait(requests)
        return perf_counter() - start

    alone_s = min(trial(True, 0) for _ in range(WARM_UP + 1))
    products = broadcast(communicator, 1 + int(COMPUTE * alone_s / product_s))
    message_s, work_s, plain_s, polled_s = _fastest(
        lambda: trial(True, 0),
        lambda: trial(False, products),
        lambda: trial(True, products),
        lambda: trial(True, products, polled=True),
    )
    plain, polled = (1.0 - (both_s - work_s) / message_s for both_s in (plain_s, polled_s))
    return min(1.0, max(0.0, plain)), min(1.0, max(0.0, polled))


def _multiply(products: int, polled: Sequence[MPI.Request] = ()) -> None:
    matrix = np.ones((_MATRIX_ORDER, _MATRIX_ORDER), dtype=np.float32)
    product = np.empty_like(matrix)
    for _ in range(products):
        np.matmul(matrix, matrix, out=product)
        for request in polled:
            request.Test()


def _fastest(*trials: Callable[[], float]) -> list[float]:
    """The fastest time of each trial; trials alternate, so that all see the same disturbances."""
    times = [[trial() for trial in trials] for _ in range(WARM_UP + TRIALS)]
    return [min(column) for column in zip(*times[WARM_UP:], strict=True)]


def main() -> None:
    """Print what ranks 0 and 1 know of each other."""
    world = MPI.COMM_WORLD
    facts = {
        "ranks": world.size,
        "hosts": world.allgather(socket.gethostname()),
        "library": " ".join(MPI.Get_library_version().replace("\0", "").splitlines()[0].split()),
        "threads": LEVELS.get(MPI.Query_thread(), "unknown"),
    }
    if world.size == 2:
        (_, latency_s), (size, time_s) = ping_pong(world, REACH_S, REACH_SIZES)
        facts |= {"latency_s": latency_s, "bandwidth_bytes_per_s": size / time_s}
    if world.rank == 0:
        sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
