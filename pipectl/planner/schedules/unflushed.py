"""Plans for schedules that no step flushes, which are made only where the job names one.

They have no start and end of a step, so what counts is the largest stage, and any number of
micro-batches is as good as another but for its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.activations.modes import ModeSearch
from pipectl.planner.assumptions import count_assumptions
from pipectl.planner.evaluate import Evaluator
from pipectl.planner.explain.what_if import with_enough_memory
from pipectl.planner.explorer import explore
from pipectl.planner.problem import Problem
from pipectl.planner.request import PlanRequest, stage_counts
from pipectl.planner.schedules.named import fastest_that_fits, pipeline_sizes
from pipectl.planner.variants import varied_plans
from pipectl.profile import Profile
from pipectl.schedule import SCHEDULES, default_warm_up
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B

MICRO_BATCHES_PER_RANK = (1, 2, 4)
"""Numbers to try where it is open; with fewer than one a rank, the two versions of the weights
that there are would let the pipeline run dry."""
LONG = 8
"""Micro-batches a stage with which start and end of a step hardly count."""


def unflushed_plan(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Callable[[], bool]
) -> Plan:
    """The plan found with the least time between updates that fits into memory.

    Stages are cut for balance, and where these do not fit for the memory there is.

    Args:
        expired: once it is true, what was found so far is good enough.

    Raises:
        InfeasibleError: nothing fits, or the micro-batches do not suit the schedule.
    """
    plans: list[Plan] = []
    reason: Exception | None = None
    problem = Problem(profile, cluster, request)
    evaluator = Evaluator(problem, expired)
    modes = ModeSearch(evaluator, (bool(request.offload),))
    for wanted in _long_steps(problem):
        if expired() and any(map(evaluator.fits, plans)):
            break
        try:  # balanced, and if that does not fit, with stages that a flushed step fits
            for machines, limit in (
                (with_enough_memory(cluster), None),
                (cluster, request.memory_limit_bytes),
            ):
                long_step = replace(wanted, memory_limit_bytes=limit)
                if request.backward_apart:
                    cut = varied_plans(profile, machines, long_step, expired)[0]
                else:
                    cut = explore(profile, machines, long_step, expired, 0)[0]
                plan = _unflushed(cut, request)
                tried = modes.simplest(plan)
                plans.append(modes.within_memory(tried) or tried)
                if evaluator.fits(plans[-1]):
                    break
        except (InfeasibleError, OutOfTimeError) as error:
            reason = error
    if reason is not None and not plans:
        raise reason
    return fastest_that_fits(plans, evaluator)


def _long_steps(problem: Problem) -> Iterator[PlanRequest]:
    """Flushed steps so long that the best stages for them are the best without flushes."""
    request, ranks = problem.request, problem.cluster.ranks
    apart = bool(request.backward_apart)
    may = apart and request.recompute is None
    plain = replace(
        request.without_variants, recompute=None if may else False, backward_apart=apart
    )
    if apart:
        stages = request.stages or max(1, ranks // 2)
        for size in _sizes(request, 2 * stages):
            yield replace(_balanced(plain, stages, size), stages=request.stages)
        return
    for stages in reversed(stage_counts(request, ranks, len(problem.graph))):
        for size in _sizes(request, stages):
            yield _balanced(plain, stages, size)


def _sizes(request: PlanRequest, ranks: int) -> list[int]:
    """Micro-batch sizes to try for a pipeline of so many ranks, the largest first."""
    assert request.schedule is not None
    staleness = SCHEDULES[request.schedule].staleness
    assert staleness is not None
    if staleness.one_micro_batch:
        if request.micro_batches not in (None, 1):
            raise InfeasibleError(
                f"no feasible plan: schedule {request.schedule} updates after every micro-batch, "
                f"so a batch cannot be divided into {request.micro_batches}",
                cure=f"leave {request.named('micro_batches')} out, or use another schedule",
            )
        return [request.batch_size]
    return pipeline_sizes(request, ranks, MICRO_BATCHES_PER_RANK)


def _unflushed(plan: Plan, request: PlanRequest) -> Plan:
    """The same stages in a step of the batch."""
    schedule, stages = request.schedule, len(plan.stages)
    assert schedule is not None
    micro_batches = ceil(request.batch_size / plan.micro_batch_size)
    apart = [bool(stage.backward_ranks) for stage in plan.stages]
    warm_up = default_warm_up(schedule, stages, micro_batches, apart=apart)
    return replace(
        plan,
        schedule=schedule,
        warm_up=warm_up,
        batch_size=request.batch_size,
        micro_batches=micro_batches,
        assumptions=(
            *plan.assumptions,
            _semantics(schedule, warm_up),
            *count_assumptions(request, micro_batches, plan.micro_batch_size),
        ),
    )


def _semantics(schedule: str, warm_up: Sequence[int]) -> str:
    """In what the results differ from those of all other schedules."""
    staleness = SCHEDULES[schedule].staleness
    assert staleness is not None
    return f"schedule {schedule} is asynchronous: {staleness.words(warm_up)}"


def _balanced(request: PlanRequest, stages: int, size: int) -> PlanRequest:
    """A long step, so that nothing but the largest stage matters."""
    count = LONG * stages
    return replace(
        request,
        stages=stages,
        schedule=ONE_F_ONE_B.name,
        warm_up=None,
        batch_size=count * size,
        micro_batches=count,
        memory_limit_bytes=None,
        replicas=1,
    )
