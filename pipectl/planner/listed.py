"""Plans for a user's own schedule: its lists say how many stages, on which ranks, in which order.

What is left is where to cut. The stages are those of a 1F1B step that is long enough for nothing
but the largest stage to matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError
from pipectl.plan import Plan
from pipectl.planner.assumptions import baseline_bytes
from pipectl.planner.costs.stage_costs import with_halves
from pipectl.planner.judge import Trials
from pipectl.planner.request import PlanRequest
from pipectl.planner.schedules.several_stages import (
    TimedPlanner,
    balanced,
    fastest_that_fits,
    on_ranks,
    one_rank_a_stage,
)
from pipectl.profile import Profile
from pipectl.schedule.listed import Listed


def listed_plan(
    make_plan: TimedPlanner,
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Callable[[], bool],
) -> Plan:
    """The plan with the order of ``request.listed``.

    Args:
        make_plan: cuts the model into stages.
        expired: once it is true, the cut found so far is good enough.

    Raises:
        InfeasibleError: the lists are for more ranks or micro-batches than there are, or the plan
            does not fit into memory.
    """
    listed = request.listed
    assert listed is not None
    size = _micro_batch_size(listed, request)
    _check_ranks(listed, cluster)
    wide = one_rank_a_stage(cluster, ceil(listed.stages / cluster.ranks))
    open_request = replace(request, listed=None, schedule=None, warm_up=None, backward_apart=False)
    cut = make_plan(profile, wide, balanced(open_request, listed.stages, size), expired)
    placed = on_ranks(cut, listed.rank_of_stage, profile, cluster, request)
    plan = with_halves(_ordered(placed, listed, request), profile)
    trials = Trials(cluster, request.memory_limit_bytes, baseline_bytes(profile), expired)
    return fastest_that_fits([trials.run(plan)], profile, cluster, request, trials)


def _micro_batch_size(listed: Listed, request: PlanRequest) -> int:
    """Samples of a micro-batch.

    Raises:
        InfeasibleError: the batch cannot be cut into as many as the lists have.
    """
    size = ceil(request.batch_size / listed.micro_batches)
    if ceil(request.batch_size / size) != listed.micro_batches:
        raise InfeasibleError(
            f"no feasible plan: schedule {listed.name} has {listed.micro_batches} micro-batches, "
            f"into which a batch of {request.batch_size} cannot be cut",
            cure="change training.batch_size, a multiple is best, or the schedule",
        )
    return size


def _check_ranks(listed: Listed, cluster: Cluster) -> None:
    if len(listed.ranks) > cluster.ranks:
        raise InfeasibleError(
            f"no feasible plan: schedule {listed.name} has {len(listed.ranks)} ranks, "
            f"there are {cluster.ranks}",
            cure="use more ranks, or a schedule of fewer",
        )


def _ordered(placed: Plan, listed: Listed, request: PlanRequest) -> Plan:
    """The stages of a plan in the order of the lists."""
    return replace(
        placed,
        schedule=listed.name,
        actions=listed.text,
        warm_up=listed.warm_up,
        batch_size=request.batch_size,
        micro_batches=listed.micro_batches,
        memory_limit_bytes=request.memory_limit_bytes,
        assumptions=(*placed.assumptions, *notices(listed)),
    )


def notices(listed: Listed) -> tuple[str, ...]:
    """What changes with the lists besides time and memory."""
    stages = listed.unordered_stages()
    if not stages:
        return ()
    return (
        f"{listed.name} adds up the gradients of stage {stages[0]}"
        f"{f' and {len(stages) - 1} more' if stages[1:] else ''} in another order than by "
        "micro-batch: results equal those of other schedules within rounding, not to the bit",
    )
