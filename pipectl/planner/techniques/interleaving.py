"""Cuts for interleaved schedules: several stages a rank, which go round over all ranks.

The stages of a rank share its speed, so stage s is cut for the device of rank s mod p. Start and
end of a step are short then, so balance is all that counts, and few micro-batches suffice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from pipectl.plan import Plan
from pipectl.planner.partition.cutter import Cutter
from pipectl.planner.partition.plans import PlanBuilder
from pipectl.planner.problem import Problem
from pipectl.planner.request import PlanRequest, micro_batch_sizes
from pipectl.planner.schedules.several_stages import MICRO_BATCHES_PER_RANK, cuts_for
from pipectl.schedule.interleaved import INTERLEAVED

MOST_ACTIONS = 150_000
"""Forwards and backwards of a step; longer ones, which interleaving helps least, are not tried."""


def interleaved_proposals(
    problem: Problem, cutter: Cutter, maker: PlanBuilder, found: Sequence[Plan]
) -> Iterator[Plan]:
    """Plans without predictions; cut for the micro-batch size of the best plan.

    Args:
        found: the best first, or none.
    """
    ranks, request = problem.cluster.ranks, problem.request
    sizes = _sizes(request, ranks, found)
    for stages in _totals(request, ranks, len(problem.graph)):
        around = [stage % ranks for stage in range(stages)]
        for partition in cuts_for(problem, cutter, around, sizes[0]):
            members = problem.members(partition)
            for size in sizes:
                if 2 * stages * problem.micro_batches(size) <= MOST_ACTIONS:
                    yield maker.interleaved(members, ranks, size)


def _totals(request: PlanRequest, ranks: int, blocks: int) -> list[int]:
    """Numbers of stages that go round over all ranks, several times."""
    if ranks == 1 or request.warm_up is not None or request.schedule is not None:
        return []
    asked = request.stages
    totals = (
        [chunks * ranks for chunks in INTERLEAVED.stages_per_rank] if asked is None else [asked]
    )
    return [stages for stages in totals if ranks < stages <= blocks and stages % ranks == 0]


def _sizes(request: PlanRequest, ranks: int, found: Sequence[Plan]) -> list[int]:
    """Micro-batch sizes to try, the first one to cut for."""
    if request.micro_batches is not None:
        return micro_batch_sizes(request, request.batch_size)
    few = [ceil(request.batch_size / (count * ranks)) for count in MICRO_BATCHES_PER_RANK]
    return list(dict.fromkeys([*(plan.micro_batch_size for plan in found[:1]), *few]))
