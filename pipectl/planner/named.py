"""The plan for a named schedule besides 1F1B and GPipe, or for a user's own lists.

Schedules without flushes are planned for several numbers of stages, others for as many as fit on
the ranks. If no plan fits, stages are cut again, within the memory that the other stages of their
rank leave free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.bounds import with_findings, work_bound_s
from pipectl.planner.choices import (
    accepted,
    allowed_values,
    check_cuts,
    stage_counts,
)
from pipectl.planner.costs.devices import one_each
from pipectl.planner.evaluator import MAX_ACTIONS
from pipectl.planner.graph.downsets import CutSpace
from pipectl.planner.judge import Judge, best_first
from pipectl.planner.other_schedules import in_order, layouts_for, mix_of, pipeline_sizes
from pipectl.planner.partition.cutter import Cutter, cut_request, merged
from pipectl.planner.partition.layout import Choice, Layout
from pipectl.planner.plans import plan_of
from pipectl.planner.problem import Problem
from pipectl.planner.request import Expired, PlanRequest, out_of_time
from pipectl.planner.simple import even_partition
from pipectl.schedule import SCHEDULES
from pipectl.schedule.listed import Listed
from pipectl.schedule.order import Placement
from pipectl.units import format_bytes

MAX_CUTS_FOR_MEMORY = 4
"""How often the stages of a plan are cut again, each time by the memory of the last plan."""


def named_plan(problem: Problem, expired: Expired) -> Plan:
    """The fastest plan found that fits into memory.

    Args:
        problem: its request names a schedule besides 1F1B and GPipe, or has lists. Lists fix the
            number of stages, their ranks and their order, so only the cuts are open.
        expired: once it returns true, the best plan so far is returned.

    Raises:
        InfeasibleError: the number of stages does not suit the ranks, there are too few ranks or
            micro-batches for the lists, or nothing fits.
        OutOfTimeError: no plan that fits was found in time.
    """
    request = problem.request
    cutter = Cutter(problem, CutSpace.plain(problem.graph), expired)
    judge = Judge(
        problem, expired, offload=allowed_values(request.offload), max_actions=MAX_ACTIONS
    )
    for places, size in _pipelines(problem):
        judge.consider(_proposals(problem, cutter, places, size))
    closest = judge.closest
    assert closest is not None
    # Stages cut for memory keep what they save, or recompute all of it.
    may_cut = not (request.backward_apart or request.offload or request.segments)
    if may_cut and problem.excess_bytes(closest) > 0:
        judge.consider_simulated(_cut_for_memory(closest, cutter, judge))
    if not judge.plans and expired():
        raise out_of_time()
    if not judge.plans:
        missing = format_bytes(round(problem.excess_bytes(closest)))
        raise InfeasibleError(
            f"no feasible plan: schedule {closest.schedule} needs {missing} "
            "more than the memory limit of a rank",
            hint="set pipeline.schedule to auto, use more ranks, or raise the limit",
        )
    plan = best_first(judge.plans)[0]
    bound_s = work_bound_s(problem, judge.evaluator.sizes)
    return with_findings(plan, bound_s, finished=judge.finished and not expired())


def _pipelines(problem: Problem) -> list[tuple[list[int], int]]:
    """(rank of every stage, samples of a micro-batch) of all pipelines to try.

    Raises:
        InfeasibleError: stages or micro-batches do not suit the schedule.
    """
    request, ranks = problem.request, problem.cluster.ranks
    if request.listed is not None:
        size = _size_of_lists(request.listed, request, problem.cluster)
        accepted(request, [size], fixed=True)
        stages = len(request.listed.rank_of_stage)
        check_cuts(stages, len(problem.graph), "use a schedule of fewer stages")
        return [(list(request.listed.rank_of_stage), size)]
    staleness = SCHEDULES[request.schedule or ""].staleness
    if staleness is None:
        places = _places(request, ranks, len(problem.graph))
        return [(places, size) for size in pipeline_sizes(request, len(set(places)))]
    if staleness.one_micro_batch and request.micro_batches not in (None, 1):
        raise InfeasibleError(
            f"no feasible plan: schedule {request.schedule} updates after every micro-batch, "
            f"so a batch cannot be divided into {request.micro_batches}",
            hint="leave pipeline.micro_batches out, or use another schedule",
        )
    if request.backward_apart:
        stages = request.fixed_stages or 1
        if 2 * stages > ranks:
            raise InfeasibleError(
                f"no feasible plan: backwards apart take two ranks per stage, which is "
                f"{2 * stages} ranks in all, and the job has {ranks}",
                hint="set pipeline.backward to together, use fewer stages, or more ranks",
            )
        ranks //= 2
    return [
        (list(range(stages)), size)
        for stages in reversed(stage_counts(request, ranks, len(problem.graph)))
        for size in (
            accepted(request, [request.batch_size], fixed=True)
            if staleness.one_micro_batch
            else pipeline_sizes(request, stages * (2 if request.backward_apart else 1))
        )
    ]


def _proposals(
    problem: Problem, cutter: Cutter, places: Sequence[int], size: int
) -> Iterator[Plan]:
    """Plans without predictions for stages on the given ranks; even cuts if time is up."""
    request = problem.request
    schedule = None if request.listed else SCHEDULES[request.schedule or ""]
    fixed = schedule is None or schedule.placement is not Placement.STRAIGHT
    layouts = layouts_for(problem, cutter, places, size, fixed=fixed)
    if not layouts:
        layouts = [Layout(even_partition(problem, len(places), size), one_each(tuple(places)))]
    for layout in layouts:
        yield from in_order(problem, layout, size, request.schedule)


def _cut_for_memory(plan: Plan, cutter: Cutter, judge: Judge) -> list[Plan]:
    """Cut again, on the same ranks, the stages of a plan that does not fit.

    Stages are cut for balance within a memory limit per stage. The limit of a rank is divided among
    its stages in proportion to their memory in the last simulated plan.

    Args:
        plan: with a prediction.

    Returns:
        Plans with predictions, the last of which may fit.
    """
    evaluator, problem, last = judge.evaluator, judge.evaluator.problem, plan
    size, order = last.micro_batch_size, (last.schedule, last.warm_up)
    ranks = tuple(stage.ranks for stage in last.stages)
    mix = mix_of(problem, [rank for (rank,) in ranks])
    others: list[Plan] = []
    with suppress(OutOfTimeError):
        for _ in range(MAX_CUTS_FOR_MEMORY):
            wanted = replace(
                cut_request(problem, size, last.warm_up, mix),
                reserved_bytes=_reserved_bytes(last, problem),
            )
            tried = []
            for cut in merged(cutter.within_limits(wanted)) or cutter.smallest_peak(wanted):
                if evaluator.is_exhausted:
                    break
                layout = Layout(cut.partition, ranks, cut.recompute)
                changed = plan_of(problem, Choice(layout, size, *order))
                changed = replace(changed, actions=last.actions, assumptions=last.assumptions)
                tried.append(evaluator.run(changed))
            if not tried:
                break
            others += tried
            before, last = last, min(tried, key=problem.excess_bytes)
            if problem.excess_bytes(last) <= 0:
                break
            if problem.excess_bytes(last) >= problem.excess_bytes(before):
                break
    return others


def _reserved_bytes(plan: Plan, problem: Problem) -> tuple[float, ...]:
    """Bytes that every stage leaves to the other stages of its rank, and to memory of no stage, if
    the contents of every rank are scaled to its limit."""
    assert plan.prediction is not None
    peaks, baseline = plan.prediction.peak_memory_bytes, problem.baseline_bytes
    reserved = []
    for stage, in_flight in zip(plan.stages, plan.warm_up, strict=True):
        (rank,), cost = stage.ranks, stage.cost
        limit = problem.limit_bytes(rank)
        stage_bytes = cost.resident_bytes + cost.accumulated_bytes + cost.cast_bytes
        stage_bytes += in_flight * stage.kept_bytes + stage.recompute * cost.saved_bytes
        share = stage_bytes / max(1, peaks[rank] - baseline)
        reserved.append((limit - baseline) * (1 - share) if limit < inf else 0.0)
    return tuple(reserved)


def _size_of_lists(listed: Listed, request: PlanRequest, cluster: Cluster) -> int:
    """Samples of a micro-batch.

    Raises:
        InfeasibleError: the batch cannot be cut into as many micro-batches as the lists have, or
            there are too few ranks.
    """
    size = ceil(request.batch_size / listed.micro_batches)
    if ceil(request.batch_size / size) != listed.micro_batches:
        raise InfeasibleError(
            f"no feasible plan: schedule {listed.name} has {listed.micro_batches} micro-batches, "
            f"into which a batch of {request.batch_size} cannot be divided",
            hint="change the schedule, or training.batch_size: best is a multiple",
        )
    if len(listed.ranks) > cluster.ranks:
        raise InfeasibleError(
            f"no feasible plan: schedule {listed.name} has {len(listed.ranks)} ranks, "
            f"but there are {cluster.ranks}",
            hint="use more ranks, or a schedule for fewer",
        )
    return size


def _places(request: PlanRequest, ranks: int, blocks: int) -> list[int]:
    """The rank of every stage.

    Args:
        blocks: number that the graph has.

    Raises:
        InfeasibleError: the schedule does not allow this number of stages, or the graph cannot be
            cut into them.
    """
    assert request.schedule is not None
    fixed, schedule = request.fixed_stages, SCHEDULES[request.schedule]
    placement, chunks = schedule.placement, schedule.stages_per_rank[0]
    v_shaped = placement is Placement.V_SHAPED
    other = f"set pipeline.schedule to auto: {request.schedule} has two stages or more per rank"
    check_cuts(2 if v_shaped else 1, blocks, other)
    if fixed is not None:
        check_cuts(fixed, blocks, f"set pipeline.stages to {blocks} or less, or to auto")
    stages = fixed or min(chunks * ranks, blocks)
    if fixed is None and v_shaped:
        stages -= stages % 2
    elif fixed is None:
        stages -= stages % min(ranks, stages)
    places = placement.fit(stages, ranks)
    if places is None:
        suitable = {
            Placement.STRAIGHT: f"{ranks}",
            Placement.ROUND: f"a multiple of {min(stages, ranks)}",
            Placement.V_SHAPED: f"{2 * ranks}",
        }
        raise InfeasibleError(
            f"no feasible plan: {placement.misfit(stages, ranks)}",
            hint=f"set pipeline.stages to {suitable[placement]}, or to auto",
        )
    return list(places)
