"""Plans for schedules that say which stages a rank holds, or that split backwards.

Stages are cut as if every one had a rank of its own, and then lie on the ranks there are: round,
for interleaved 1F1B and looped breadth-first, in a V for ZB-V and DualPipeV, one a rank for ZB-H1.
Few micro-batches suffice, as these schedules shorten start and end; several numbers are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError
from pipectl.plan import Plan
from pipectl.planner.request import ROUND, V_SHAPED, Planner, PlanRequest, micro_batch_sizes
from pipectl.planner.techniques.halves import with_halves
from pipectl.planner.trials import predicted
from pipectl.profile import Profile
from pipectl.schedule import default_warm_up, splits_backwards
from pipectl.schedule.one_f_one_b import NAME as ONE_F_ONE_B
from pipectl.schedule.one_f_one_b import policy_a, policy_b
from pipectl.schedule.zb_h1 import NAME as ZB_H1
from pipectl.units import format_bytes

CHUNKS = 2
"""Stages a rank where their number is open, or given by the schedule."""
MICRO_BATCHES_PER_RANK = (1, 2, 4, 8)
"""Numbers to try where it is open."""
LONG = 8
"""Micro-batches a stage with which start and end of a step hardly count."""


def placed_plan(
    make_plan: Planner, profile: Profile, cluster: Cluster, request: PlanRequest, baseline: int
) -> Plan:
    """The fastest plan found that fits into memory.

    Args:
        make_plan: cuts the model into stages.
        request: with a schedule of this module.
        baseline: bytes of a process without a stage.

    Raises:
        InfeasibleError: the stages do not suit the ranks, or nothing fits.
    """
    places = _places(request, cluster)
    wide = one_rank_a_stage(cluster, ceil(len(places) / cluster.ranks))
    found = [
        predicted(plan, cluster, baseline)
        for size in _sizes(request, len(set(places)))
        for cut in [make_plan(profile, wide, balanced(request, len(places), size))]
        for plan in _ordered(_placed(cut, cluster, request, places), profile, request)
    ]
    return fastest_that_fits(found, cluster, request)


def _places(request: PlanRequest, cluster: Cluster) -> list[int]:
    """The rank of every stage.

    Raises:
        InfeasibleError: that number of stages has no place in the schedule.
    """
    fixed, ranks = request.fixed_stages, cluster.ranks
    if request.schedule == ZB_H1:
        stages = fixed or ranks
        _check(stages <= ranks, request, f"{stages} stages need as many ranks, of {ranks}", ranks)
        return list(range(stages))
    stages = fixed or CHUNKS * ranks
    if request.schedule in V_SHAPED:
        fits = stages % 2 == 0 and stages <= 2 * ranks
        _check(fits, request, f"{stages} stages cannot lie in a V over {ranks} ranks", 2 * ranks)
        half = range(stages // 2)
        return [*half, *reversed(half)]
    around = min(stages, ranks)
    _check(
        stages % around == 0,
        request,
        f"{stages} stages cannot go round over {around} ranks",
        around,
    )
    return [stage % around for stage in range(stages)]


def _check(fits: bool, request: PlanRequest, fault: str, suitable: int) -> None:
    if not fits:
        multiple = "a multiple of " if request.schedule in ROUND else ""
        raise InfeasibleError(
            f"no feasible plan: {fault}",
            cure=f"set pipeline.stages to {multiple}{suitable}, or to auto",
        )


def one_rank_a_stage(cluster: Cluster, chunks: int) -> Cluster:
    """The cluster with every rank as often as it has chunks, and memory for all."""
    nodes = tuple(
        replace(
            node,
            ranks=chunks * node.ranks,
            cores=chunks * node.cores,
            device=replace(node.device, memory_bytes=None),
        )
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def _sizes(request: PlanRequest, ranks: int) -> list[int]:
    """Micro-batch sizes to try, the largest first."""
    batch = request.batch_size
    if request.micro_batches is not None:
        return micro_batch_sizes(request, batch)
    return sorted({ceil(batch / (count * ranks)) for count in MICRO_BATCHES_PER_RANK}, reverse=True)


def balanced(request: PlanRequest, stages: int, size: int) -> PlanRequest:
    """A long step, so that nothing but the largest stage matters."""
    count = LONG * stages
    return replace(
        request,
        stages=stages,
        schedule=ONE_F_ONE_B,
        warm_up=None,
        batch_size=count * size,
        micro_batches=count,
        memory_limit_bytes=None,
    )


def _placed(plan: Plan, cluster: Cluster, request: PlanRequest, places: list[int]) -> Plan:
    """The stages on their ranks, in a step of the batch."""
    assert request.schedule is not None
    stages = zip(plan.stages, places, strict=True)
    return replace(
        plan,
        schedule=request.schedule,
        batch_size=request.batch_size,
        micro_batches=ceil(request.batch_size / plan.micro_batch_size),
        stages=tuple(replace(stage, ranks=(rank,)) for stage, rank in stages),
        node_of_rank=cluster.node_of_rank,
    )


def _ordered(plan: Plan, profile: Profile, request: PlanRequest) -> Iterator[Plan]:
    """With every warm-up that is open, and the cost of halves where backwards are split."""
    stages, count = len(plan.stages), plan.micro_batches
    if request.warm_up is not None:
        warm_ups = [request.warm_up]
    elif plan.schedule == ZB_H1:
        warm_ups = [policy_a(stages, count), policy_b(stages, count)]
    else:
        ranks = len({stage.ranks for stage in plan.stages})
        warm_ups = [default_warm_up(plan.schedule, stages, count, ranks=ranks)]
    split = with_halves(plan, profile) if splits_backwards(plan) else plan
    for warm_up in dict.fromkeys(warm_ups):
        yield replace(split, warm_up=tuple(min(depth, count) for depth in warm_up))


def fastest_that_fits(plans: list[Plan], cluster: Cluster, request: PlanRequest) -> Plan:
    """The fastest that fits.

    Raises:
        InfeasibleError: none does.
    """
    fitting = [plan for plan in plans if excess_bytes(plan, cluster, request) <= 0]
    if not fitting:
        least = min(excess_bytes(plan, cluster, request) for plan in plans)
        raise InfeasibleError(
            f"no feasible plan: schedule {plans[0].schedule} needs {format_bytes(round(least))} "
            "more than the memory limit of a rank",
            cure="set pipeline.schedule to auto, use more ranks, or raise the limit",
        )
    chosen = min(fitting, key=lambda plan: plan.predicted_step_s)
    return replace(chosen, memory_limit_bytes=request.memory_limit_bytes)


def excess_bytes(plan: Plan, cluster: Cluster, request: PlanRequest) -> float:
    """The most that a rank holds beyond its limit."""
    assert plan.prediction is not None
    return max(
        peak - cluster.memory_of(rank, request.memory_limit_bytes)
        for rank, peak in enumerate(plan.prediction.peak_memory_bytes)
    )
