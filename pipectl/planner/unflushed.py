"""Plans for schedules that no step flushes, which are made only where the job names one.

They have no start and end of a step, so what counts is the largest stage, and any number of
micro-batches is as good as another but for its size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.condense import condense
from pipectl.planner.placed import balanced, fastest_that_fits, predicted
from pipectl.planner.request import PlanRequest, micro_batch_sizes, stage_counts
from pipectl.profile import Profile
from pipectl.schedule import default_warm_up, pipedream

Planner = Callable[[Profile, Cluster, PlanRequest, Callable[[], bool]], Plan]

MICRO_BATCHES_A_STAGE = (1, 2, 4)
"""Numbers to try where it is open; with fewer than one a stage, the two versions of the weights
that there are would let the pipeline run dry."""


def unflushed_plan(
    make_plan: Planner,
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    baseline: int,
    expired: Callable[[], bool],
) -> Plan:
    """The plan found with the least time between updates that fits into memory.

    Args:
        make_plan: cuts the model into stages.
        baseline: bytes of a process without a stage.
        expired: once it is true, what was found so far is good enough.

    Raises:
        InfeasibleError: nothing fits, or the micro-batches do not suit the schedule.
    """
    counts = stage_counts(request, cluster.ranks, len(condense(profile)))
    found: list[Plan] = []
    plain = replace(request.without_variants, recompute=False)
    for stages in reversed(counts):
        for size in _sizes(request, stages):
            if not (found and expired()):
                with suppress(*((InfeasibleError, OutOfTimeError) if found else ())):
                    plan = make_plan(profile, cluster, balanced(plain, stages, size), expired)
                    found.append(predicted(_unflushed(plan, request), cluster, baseline))
    return fastest_that_fits(found, cluster, request)


def _sizes(request: PlanRequest, stages: int) -> list[int]:
    """Micro-batch sizes to try, the largest first."""
    batch = request.batch_size
    if request.schedule == pipedream.NAME:
        if request.micro_batches not in (None, 1):
            raise InfeasibleError(
                f"no feasible plan: schedule {pipedream.NAME} updates behind every micro-batch, "
                f"so a batch cannot be cut into {request.micro_batches}",
                cure=f"leave {request.named('micro_batches')} out, or use schedule pipedream-2bw",
            )
        return [batch]
    if request.micro_batches is not None:
        return micro_batch_sizes(request, batch)
    return sorted({ceil(batch / (count * stages)) for count in MICRO_BATCHES_A_STAGE}, reverse=True)


def _unflushed(plan: Plan, request: PlanRequest) -> Plan:
    """The same stages in a step of the batch."""
    schedule, stages = request.schedule or pipedream.NAME, len(plan.stages)
    micro_batches = ceil(request.batch_size / plan.micro_batch_size)
    again, away = bool(request.recompute), bool(request.offload)
    return replace(
        plan,
        stages=tuple(replace(stage, recompute=again, offload=away) for stage in plan.stages),
        schedule=schedule,
        warm_up=default_warm_up(schedule, stages, micro_batches),
        batch_size=request.batch_size,
        micro_batches=micro_batches,
        assumptions=(*plan.assumptions, _semantics(schedule, stages)),
    )


def _semantics(schedule: str, stages: int) -> str:
    """In what the results differ from those of all other schedules."""
    if schedule == pipedream.NAME:
        ages = ", ".join(str(stages - 1 - stage) for stage in range(stages))
        stale = f"gradients are of weights that are {ages} updates old in stages 0 to {stages - 1}"
        return f"schedule {schedule} is asynchronous: {stale}, so results depend on the stages"
    stale = "gradients are of weights that are one update old"
    return f"schedule {schedule} is asynchronous: {stale}, whatever the stages"
