"""Plans for interleaved 1F1B: several stages a rank.

Stages are cut as if every chunk had a rank of its own, and then go round over the ranks there are.
Few micro-batches suffice, as the chunks shorten start and end; several numbers are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError
from pipectl.plan import Plan
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile
from pipectl.schedule.interleaved import NAME, warm_up
from pipectl.schedule.one_f_one_b import NAME as ONE_F_ONE_B
from pipectl.simulate import simulate
from pipectl.units import format_bytes

Planner = Callable[[Profile, Cluster, PlanRequest], Plan]

CHUNKS = 2
"""Stages a rank where their number is open."""
MICRO_BATCHES_PER_RANK = (1, 2, 4, 8)
"""Numbers to try where it is open."""


def interleaved_plan(
    make_plan: Planner, profile: Profile, cluster: Cluster, request: PlanRequest, baseline: int
) -> Plan:
    """The fastest plan found that fits into memory.

    Args:
        make_plan: cuts the model into stages.
        baseline: bytes of a process without a stage.

    Raises:
        InfeasibleError: the stages do not go round, or nothing fits.
    """
    stages = request.stages or CHUNKS * cluster.ranks
    ranks = min(stages, cluster.ranks)
    if stages % ranks:
        raise InfeasibleError(
            f"no feasible plan: {stages} stages cannot go round over {ranks} ranks",
            cure=f"set pipeline.stages to a multiple of {ranks}, or to auto",
        )
    wide = _one_rank_a_stage(cluster, stages // ranks)
    found = [
        _predicted(_folded(make_plan(profile, wide, item), cluster, ranks), cluster, baseline)
        for item in _requests(request, stages, ranks)
    ]
    return _best(found, cluster, request)


def _one_rank_a_stage(cluster: Cluster, chunks: int) -> Cluster:
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


def _requests(request: PlanRequest, stages: int, ranks: int) -> Iterator[PlanRequest]:
    """One for every number of micro-batches."""
    whole = replace(request, stages=stages, schedule=ONE_F_ONE_B, memory_limit_bytes=None)
    open_counts = [count * ranks for count in MICRO_BATCHES_PER_RANK]
    asked = request.micro_batches
    for count in sorted({min(count, request.batch_size) for count in open_counts}):
        if asked is None:
            yield replace(whole, micro_batches=count)
    if asked is not None:
        yield whole


def _folded(plan: Plan, cluster: Cluster, ranks: int) -> Plan:
    """Stage s on rank s mod ``ranks``."""
    count = len(plan.stages)
    return replace(
        plan,
        schedule=NAME,
        warm_up=warm_up(count, plan.micro_batches, ranks),
        stages=tuple(
            replace(stage, ranks=(index % ranks,)) for index, stage in enumerate(plan.stages)
        ),
        node_of_rank=cluster.node_of_rank,
    )


def _predicted(plan: Plan, cluster: Cluster, baseline: int) -> Plan:
    found = simulate(plan, cluster, process_baseline_bytes=baseline)
    return replace(plan, prediction=found.prediction)


def _best(plans: list[Plan], cluster: Cluster, request: PlanRequest) -> Plan:
    """The fastest that fits.

    Raises:
        InfeasibleError: none does.
    """
    fitting = [plan for plan in plans if _excess(plan, cluster, request) <= 0]
    if not fitting:
        least = min(_excess(plan, cluster, request) for plan in plans)
        raise InfeasibleError(
            f"no feasible plan: schedule {NAME} needs {format_bytes(round(least))} more than the "
            "memory limit of a rank",
            cure="set pipeline.schedule to auto, use more ranks, or raise the limit",
        )
    chosen = min(fitting, key=_step_time_s)
    return replace(chosen, memory_limit_bytes=request.memory_limit_bytes)


def _step_time_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s


def _excess(plan: Plan, cluster: Cluster, request: PlanRequest) -> float:
    """The most that a rank holds beyond its limit."""
    assert plan.prediction is not None
    limits = (
        min(
            limit if limit is not None else float("inf")
            for limit in (request.memory_limit_bytes, cluster.device(rank).memory_bytes)
        )
        for rank in range(cluster.ranks)
    )
    peaks = plan.prediction.peak_memory_bytes
    return max(peak - limit for peak, limit in zip(peaks, limits, strict=True))
