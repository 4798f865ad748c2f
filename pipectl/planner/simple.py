"""Simple plans, which everybody could write down: even cuts of the graph's own order.

A search that may choose replicas tries copies of such pipelines on any number of ranks, so that its
plan is not slower than the best of them. A search that ends before it has judged anything falls
back to an even cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf

import numpy as np

from pipectl.planner.candidates import Candidates
from pipectl.planner.choices import (
    MICRO_BATCHES_PER_STAGE,
    micro_batch_sizes,
    numbers_of_copies,
    open_orders,
    sizes_of_stages,
)
from pipectl.planner.costs.devices import one_each
from pipectl.planner.graph.blocks import bitset
from pipectl.planner.graph.downsets import Partition
from pipectl.planner.partition.layout import Choice, Layout, consecutive
from pipectl.planner.partition.replicated import MAX_UNITS
from pipectl.planner.problem import Problem

MAX_SLOWER, MAX_PLANNED = 1.25, 3
"""Copies of a pipeline are planned if their even cuts are slower by at most this factor than the
fastest even cuts; at most so many numbers of copies, and on very many ranks only one."""


def even_copies(problem: Problem) -> Iterator[tuple[int, Layout]]:
    """Copies of a pipeline of even stages on all ranks, and on those without the slowest kinds of
    devices or those with the least memory, with the sizes of micro-batches that the copies split.

    There are as many copies as divide the ranks, and every stage keeps all values or recomputes.
    """
    request, blocks = problem.request, len(problem.graph)
    again = (False, True) if request.recompute is None and problem.has_limits else (False,)
    for ranks in _ranks_to_use(problem):
        for copies in numbers_of_copies(len(ranks)):
            stages = request.fixed_stages or min(len(ranks) // copies, blocks)
            if stages * copies > len(ranks) or (copies > 1 and problem.unreplicated):
                continue
            most = stages * MICRO_BATCHES_PER_STAGE
            for size in micro_batch_sizes(request, request.batch_size):
                if size < copies or problem.micro_batches(size) > most:
                    continue
                partition = even_partition(problem, stages, -(-size // copies))
                places = consecutive((copies,) * stages, ranks)
                for recompute in again:
                    chosen = (True,) * stages if recompute else ()
                    yield size, Layout(partition, places, chosen)


def promising_copies(problem: Problem) -> list[int]:
    """Numbers of copies whose even cuts have nearly the shortest estimate, the shortest first."""
    layouts: dict[int, list[Layout]] = {}
    for size, layout in even_copies(problem):
        layouts.setdefault(size, []).append(layout)
    least_s: dict[int, float] = {}
    for size, even in layouts.items():
        for each in Candidates(problem, even, size, with_replicas=True):
            copies = max(each.choice.replicas)
            least_s[copies] = min(each.estimate_s, least_s.get(copies, inf))
    order = sorted(least_s, key=least_s.__getitem__)
    near = [each for each in order if least_s[each] <= least_s[order[0]] * MAX_SLOWER]
    return near[: MAX_PLANNED if problem.cluster.ranks <= MAX_UNITS else 1]


def _ranks_to_use(problem: Problem) -> list[tuple[int, ...]]:
    """All ranks, those of the fastest kinds of devices, and those of the kinds with most memory."""
    pools = problem.devices
    by_memory = sorted(pools, key=lambda pool: -problem.limit_bytes(pool.ranks[0]))
    chosen = [
        tuple(sorted(rank for pool in order[: count + 1] for rank in pool.ranks))
        for order in (pools, by_memory)
        for count in reversed(range(len(order)))
    ]
    return list(dict.fromkeys(chosen))


def even_choices(problem: Problem, counts: Sequence[int]) -> Iterator[Choice]:
    """Even cuts of the graph's own order into the most stages and the fewest.

    Micro-batches have about the measured size, or the smallest size to try, which needs the least
    memory. The schedule is the one with the fewest micro-batches in flight.

    Args:
        counts: numbers of stages that are allowed, ascending.
    """
    measured = problem.profile.micro_batch_size
    fastest = [rank for pool in problem.devices for rank in pool.ranks]
    for stages in dict.fromkeys((counts[-1], counts[0])):
        sizes = sizes_of_stages(problem.request, problem.profile, stages)
        near = min(sizes, key=lambda size: (abs(size - measured), size))
        for size in dict.fromkeys((near, min(sizes))):
            order = open_orders(problem.request, stages, problem.micro_batches(size))[0]
            partition = even_partition(problem, stages, size)
            ranks = one_each(tuple(sorted(fastest[:stages])))
            yield Choice(Layout(partition, ranks), size, *order)


def even_partition(problem: Problem, stages: int, size: int) -> Partition:
    """Consecutive blocks, at least one per stage, cut where sums are nearest to even shares."""
    times = problem.costs.block_times(size)
    sums, cuts = np.concatenate([[0.0], np.cumsum(times)]), [0]
    for stage in range(1, stages):
        nearest = int(np.abs(sums - sums[-1] * stage / stages).argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1), len(times) - stages + stage))
    return tuple(bitset(range(*ends)) for ends in pairwise([*cuts, len(times)]))
