"""Plans that can be had at once, for searches that end before they have found any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from pipectl.planner.costs.devices import one_each
from pipectl.planner.graph.blocks import bitset
from pipectl.planner.graph.downsets import Partition
from pipectl.planner.partition.estimate import Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import Order, micro_batch_sizes, open_orders

_MICRO_BATCHES_PER_STAGE = 4


def first_choices(problem: Problem, counts: Sequence[int]) -> Iterator[tuple[Layout, int, Order]]:
    """Even cuts of the graph's own order into the most stages and the fewest.

    With micro-batches near the measured size, and with the smallest that are worth a try, which
    need the least memory; of schedules the one with the fewest micro-batches in flight.

    Args:
        counts: numbers of stages that are allowed, ascending.
    """
    measured, request = problem.profile.micro_batch_size, problem.request
    for stages in dict.fromkeys((counts[-1], counts[0])):
        sizes = micro_batch_sizes(request, _MICRO_BATCHES_PER_STAGE * stages)
        near = min(sizes, key=lambda size: (abs(size - measured), size))
        for size in dict.fromkeys((near, min(sizes))):
            order = open_orders(request, stages, problem.micro_batches(size))[0]
            again = (bool(request.recompute),) * stages if request.recompute else ()
            cut = _even(problem.block_times(size), stages)
            yield Layout(cut, one_each(_fastest(problem, stages)), again), size, order


def _fastest(problem: Problem, stages: int) -> tuple[int, ...]:
    ranks = [rank for pool in problem.devices for rank in pool.ranks]
    return tuple(sorted(ranks[:stages]))


def _even(times: Sequence[float], stages: int) -> Partition:
    """Consecutive blocks, at least one a stage, cut where the sum is nearest to even shares."""
    sums = np.concatenate([[0.0], np.cumsum(times)])
    cuts = [0]
    for stage in range(1, stages):
        nearest = int(np.abs(sums - sums[-1] * stage / stages).argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1), len(times) - stages + stage))
    return tuple(bitset(range(*ends)) for ends in pairwise([*cuts, len(times)]))
