"""Plans for interleaved 1F1B: several stages a rank.

Stages are cut as if every chunk had a rank of its own, and then go round over the ranks there are.
Few micro-batches suffice, as the chunks shorten start and end; several numbers are simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError
from pipectl.plan import Plan
from pipectl.planner.request import PlanRequest, micro_batch_sizes
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
LONG = 8
"""Micro-batches a stage with which start and end of a step hardly count."""


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
    wide = one_rank_a_stage(cluster, stages // ranks)
    found = [
        _predicted(_folded(plan, cluster, request.batch_size, ranks), cluster, baseline)
        for size in _sizes(request, ranks)
        for plan in [make_plan(profile, wide, balanced(request, stages, size))]
    ]
    return _best(found, cluster, request)


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
        batch_size=count * size,
        micro_batches=count,
        memory_limit_bytes=None,
    )


def _folded(plan: Plan, cluster: Cluster, batch_size: int, ranks: int) -> Plan:
    """Stage s on rank s mod ``ranks``, in a step of the batch."""
    stages, micro_batches = len(plan.stages), ceil(batch_size / plan.micro_batch_size)
    return replace(
        plan,
        schedule=NAME,
        warm_up=warm_up(stages, micro_batches, ranks),
        batch_size=batch_size,
        micro_batches=micro_batches,
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
    fitting = [plan for plan in plans if excess_bytes(plan, cluster, request) <= 0]
    if not fitting:
        least = min(excess_bytes(plan, cluster, request) for plan in plans)
        raise InfeasibleError(
            f"no feasible plan: schedule {NAME} needs {format_bytes(round(least))} more than the "
            "memory limit of a rank",
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
