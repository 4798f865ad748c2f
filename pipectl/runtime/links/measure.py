"""Measuring links and sums: MPI messages as the training sends them, without torch.

One experiment runs at a time, while all other ranks wait without using their cores. Every rank gets
every result, so all ranks take the same decisions without a message about them.
"""

from __future__ import annotations

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

from pipectl.link import Link, Observed, Timings, measured_link
from pipectl.plan.sums import BUCKET_BYTES, ROUNDS, parts_of_bucket
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
"""Size of the messages that compete, if messages of this size were measured."""
FULL_DUPLEX = 1.5
"""Below this ratio of times, both directions count as independent: one link would give 2."""

WARM_UP = 2
MIN_REPEATS, MAX_REPEATS = 3, 300
TRIALS = 9
"""Repeats of which the fastest counts: disturbances only ever make it slower."""
COMPUTE = 2.0
"""Time of the computation that a message overlaps, in times of the message."""
OVERLAP_COST = (WARM_UP + TRIALS) * (3 * COMPUTE + 3)
"""Longest time of an overlap experiment, in times of the message."""
_MATRIX_ORDER = 96  # a product of matrices of this order is an operator of some ten microseconds


class Session:
    """Ranks that measure together.

    Args:
        communicator: of its own, so that no other message can match.
    """

    def __init__(self, communicator: MPI.Comm) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size

    def run(self, ranks: Sequence[int], experiment: Callable[[Session], T]) -> T:
        """The first of some ranks' result of an experiment that these ranks run; collective."""
        barrier(self._communicator)
        takes_part = self.rank in ranks
        color, key = (0, ranks.index(self.rank)) if takes_part else (MPI.UNDEFINED, 0)
        communicator = self._communicator.Split(color, key)
        mine: Any = None
        if takes_part:
            mine = experiment(Session(communicator))
            communicator.Free()
        result: T = broadcast(self._communicator, mine, ranks[0])
        return result

    def send(self, buffer: Array, rank: int, tag: int = 0) -> MPI.Request:
        """Start to send an array."""
        return self._communicator.Isend([buffer.view(np.uint8), MPI.BYTE], rank, tag)

    def receive(self, buffer: Array, rank: int, tag: int = 0) -> MPI.Request:
        """Start to receive into an array."""
        return self._communicator.Irecv([buffer.view(np.uint8), MPI.BYTE], rank, tag)

    def meet(self) -> None:
        """Return when all ranks have come here."""
        barrier(self._communicator)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on all ranks."""
        values: list[T] = self._communicator.allgather(value)
        return values

    def agree(self, value: T) -> T:
        """The first rank's value, on all ranks."""
        return broadcast(self._communicator, value)

    def time_by_size(
        self,
        sizes: Sequence[int],
        budget_s: float,
        prepare: Callable[[int], Callable[[], float]],
        min_sizes: int,
    ) -> Table:
        """The slowest rank's median time for each size, as long as the budget allows.

        Args:
            prepare: makes, for a size, a function that returns the seconds it took.
            min_sizes: so many sizes are measured in any case.
        """
        end = perf_counter() + budget_s
        table: Table = []
        for index, size in enumerate(sizes):
            left_s = end - perf_counter()
            expected_s = table[-1][1] * size / sizes[index - 1] if table else 0.0
            affordable = expected_s * (WARM_UP + MIN_REPEATS) < left_s
            if not self.agree(index < min_sizes or affordable):
                break
            once = prepare(size)
            for _ in range(WARM_UP):
                start = perf_counter()
                once()
            once_s = perf_counter() - start
            repeats = self.agree(repeats_for(once_s, left_s / (len(sizes) - index)))
            table.append((size, max(self.gather(median([once() for _ in range(repeats)])))))
        return table


def repeats_for(once_s: float, share_s: float) -> int:
    """How often to repeat what takes ``once_s``."""
    return int(min(MAX_REPEATS, max(MIN_REPEATS, share_s / max(once_s, 1e-7))))


def measure_link(session: Session, pairs: Sequence[tuple[int, int]], share_s: float) -> Link:
    """The link that some pairs have, in about ``share_s`` seconds for each pair, and once more."""
    tables = [session.run(pair, partial(ping_pong, budget_s=share_s)) for pair in pairs]
    link = measured_link(_mean(tables))
    size = min(CONTENTION_BYTES, link.timings[-1][0])
    ratio = session.run(pairs[0], partial(both_ways, size=size))
    overlap = tuple(
        (size, *session.run(pairs[0], partial(hidden_shares, size=size)))
        for size in overlap_sizes(link, share_s)
    )
    observed = Observed(both_ways=ratio, overlap=overlap)
    return replace(link, duplex=ratio < FULL_DUPLEX, observed=observed)


def measure_sharing(session: Session, link: Link, nodes: Sequence[Sequence[int]]) -> Link:
    """The link between nodes, with whether the ranks of the first two nodes share it.

    ``n`` pairs on one link take ``n`` times as long as one, on ``n`` links as long as one; the
    border is the square root.
    """
    pairs = min(len(nodes[0]), len(nodes[1]))
    if pairs < 2 or link.observed is None:
        return link
    size = min(CONTENTION_BYTES, link.timings[-1][0])
    alone_s, all_s = (
        session.run([*nodes[0][:count], *nodes[1][:count]], partial(one_way_s, size=size))
        for count in (1, pairs)
    )
    ratio = all_s / alone_s
    observed = replace(link.observed, pairs=pairs, at_once=ratio)
    return replace(link, shared=ratio > sqrt(pairs), observed=observed)


def measure_sums(session: Session, ranks: int, share_s: float) -> Table:
    """Time of a float32 sum over the first ranks, by the bytes of the vector."""

    def prepare(session: Session, size: int) -> Callable[[], float]:
        buckets = buckets_of(session, np.ones(size // 4, dtype=np.float32))

        def once() -> float:
            session.meet()
            start = perf_counter()
            sum_buckets(buckets)
            return perf_counter() - start

        return once

    return session.run(
        range(ranks),
        lambda group: group.time_by_size(SUM_SIZES, share_s, partial(prepare, group), 1),
    )


def overlap_sizes(link: Link, share_s: float) -> list[int]:
    """The sizes there is time for; the largest measured one if that is smaller."""
    largest = link.timings[-1][0]
    sizes = [size for size in OVERLAP_SIZES if size <= largest] or [largest]
    return [s for s in sizes if s == sizes[0] or OVERLAP_COST * link.transfer_s(s) < share_s]


def _mean(tables: Sequence[Table]) -> Timings:
    return tuple(
        (rows[0][0], sum(time_s for _, time_s in rows) / len(rows))
        for rows in zip(*tables, strict=False)
    )


def ping_pong(session: Session, budget_s: float) -> Table:
    """Half a round trip between two ranks that nobody disturbs, in seconds, by size.

    The receive is posted ahead, as in training; the second rank answers when it has all.
    """
    other = 1 - session.rank

    def prepare(size: int) -> Callable[[], float]:
        sent, received = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)

        def round_trip() -> float:
            start = perf_counter()
            receiving = session.receive(received, other)
            if session.rank == 0:
                wait([receiving, session.send(sent, other)])
            else:
                wait([receiving])
                wait([session.send(sent, other)])
            return perf_counter() - start

        return round_trip

    table = session.time_by_size(PING_PONG_SIZES, budget_s, prepare, 2)
    return [(size, time_s / 2) for size, time_s in table]


def both_ways(session: Session, size: int) -> float:
    """Time in which two ranks send each other ``size`` bytes, over that of one direction."""
    sent, received = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    one_s, both_s = _fastest(
        partial(_transfer_s, session, sent, received, both=False),
        partial(_transfer_s, session, sent, received, both=True),
    )
    return both_s / one_s


def one_way_s(session: Session, size: int) -> float:
    """Time until the slowest of several pairs has sent ``size`` bytes, in seconds.

    The two ends would take turns in a ping-pong, and two pairs could evade each other.
    """
    buffer = np.ones(size, dtype=np.uint8)
    (time_s,) = _fastest(partial(_transfer_s, session, buffer, buffer, both=False))
    return time_s


def _transfer_s(session: Session, sent: Array, received: Array, *, both: bool) -> float:
    """Time until the first half of the ranks has sent to the second, and back if ``both``."""
    pairs = session.size // 2
    first = session.rank < pairs
    other = session.rank + (pairs if first else -pairs)
    receives = [] if first and not both else [session.receive(received, other)]
    session.meet()
    start = perf_counter()
    sends = [session.send(sent, other)] if first or both else []
    wait([*receives, *sends])
    session.meet()
    return perf_counter() - start


def hidden_shares(session: Session, size: int) -> tuple[float, float]:
    """The share of a message's time that computing hides, without and with polls, from 0 to 1.

    Many MPIs move large messages only inside their own calls. A rank that computes meanwhile makes
    no such call, unless it polls. What counts is when both the work and the message are done: if
    the receiver's processor copies the message, polls take as long from the work as they save from
    the wait, and hide nothing. The first rank receives; it waits for what was not hidden.
    """
    buffer = np.ones(size, dtype=np.uint8)
    _multiply(50)
    start = perf_counter()
    _multiply(50)
    product_s = (perf_counter() - start) / 50

    def trial(message: bool, products: int, polled: bool = False) -> float:
        """Time until this rank has computed, and its message has left or arrived."""
        receives = [session.receive(buffer, 1)] if message and session.rank == 0 else []
        session.meet()
        start = perf_counter()
        requests = receives or ([session.send(buffer, 0)] if message else [])
        _multiply(products, requests if polled else ())
        wait(requests)
        return perf_counter() - start

    alone_s = min(trial(True, 0) for _ in range(WARM_UP + 1))
    products = session.agree(1 + int(COMPUTE * alone_s / product_s))
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
    """The fastest time of each trial; they take turns, so that all meet the same disturbances."""
    times = [[trial() for trial in trials] for _ in range(WARM_UP + TRIALS)]
    return [min(column) for column in zip(*times[WARM_UP:], strict=True)]


class Bucket:
    """Gradients that travel together; see :mod:`pipectl.plan.sums`.

    Args:
        gradients: become their mean over the ranks, so that repeated sums do not grow.
    """

    def __init__(self, session: Session, gradients: Array, tag: int) -> None:
        self._session, self._tag = session, tag
        self._gradients, self._flat = gradients, np.empty_like(gradients)
        parts = parts_of_bucket(len(gradients), session.size)
        self._parts = [self._flat[part.start : part.stop] for part in parts]
        self._own = self._parts[session.rank]
        self._others = [rank for rank in range(session.size) if rank != session.rank]
        self._arriving = {rank: np.empty_like(self._own) for rank in self._others}
        self._sums = {rank: np.empty_like(self._parts[rank]) for rank in self._others}

    def start(self) -> None:
        """Send the others their parts, and receive one's own."""
        np.copyto(self._flat, self._gradients)
        self._receives, self._requests = [], []
        for rank in self._others:
            self._receives.append(self._session.receive(self._arriving[rank], rank, self._tag))
            self._requests.append(self._session.send(self._parts[rank], rank, self._tag))

    def add_up(self) -> None:
        """Add up one's own part once all have sent it, and send the result to all."""
        wait(self._receives)
        for part in self._arriving.values():
            self._own += part
        self._own /= self._session.size
        for rank in self._others:
            self._requests.append(self._session.receive(self._sums[rank], rank, self._tag + 1))
            self._requests.append(self._session.send(self._own, rank, self._tag + 1))

    def finish(self) -> None:
        """Take in the results of all others."""
        wait(self._requests)
        for rank, part in self._sums.items():
            np.copyto(self._parts[rank], part)
        np.copyto(self._gradients, self._flat)


def buckets_of(session: Session, gradients: Array) -> list[Bucket]:
    """The buckets of a vector that takes the place of a stage's gradients."""
    step = BUCKET_BYTES // 4
    return [
        Bucket(session, gradients[start : start + step], ROUNDS * index)
        for index, start in enumerate(range(0, len(gradients), step))
    ]


def sum_buckets(buckets: Sequence[Bucket]) -> None:
    """Send, add up and receive as :class:`pipectl.runtime.reduction.StageReduction` does."""
    for bucket in buckets:
        bucket.start()
    for bucket in buckets:
        bucket.add_up()
    for bucket in buckets:
        bucket.finish()
