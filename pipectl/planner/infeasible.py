"""The error for a job that does not fit: how much is missing, where, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from pipectl.errors import InfeasibleError
from pipectl.plan import Plan
from pipectl.planner.choices import micro_batch_sizes, open_orders, takes
from pipectl.planner.costs.devices import mixes
from pipectl.planner.evaluator import Evaluator
from pipectl.planner.graph.downsets import CutSpace
from pipectl.planner.modes import ON_THE_DEVICE, ModeSearch
from pipectl.planner.partition.cutter import Cutter, cut_request, layouts_of
from pipectl.planner.partition.layout import Choice
from pipectl.planner.plans import plan_of
from pipectl.planner.problem import Problem
from pipectl.planner.request import PlanRequest
from pipectl.schedule.one_f_one_b import GPIPE, ONE_F_ONE_B
from pipectl.simulate.memory import evaluation_peaks
from pipectl.units import format_bytes, plural

MAX_COUNTS = 8
"""If more numbers of stages are allowed, the fewest and the most are tried."""
MAX_REST = 0.9
"""A change after which more than this share of the missing memory is missing is not listed."""


def least_demanding(
    problem: Problem, cutter: Cutter, counts: Sequence[int], offload: tuple[bool, ...] = (False,)
) -> tuple[Choice, Plan]:
    """The choice for little memory that exceeds its limits least, or stays within them.

    Args:
        cutter: of the same graph; its request and its cluster may differ.
        counts: allowed numbers of stages; more stages rarely need more memory.
        offload: the allowed values of whether stages offload.

    Returns:
        The choice, and its plan with a prediction and the modes that need the least memory.
    """
    request, evaluator = problem.request, Evaluator(problem)
    plans: list[tuple[Choice, Plan]] = []
    size = micro_batch_sizes(request, request.batch_size)[-1]
    for stages in sorted({*counts[:MAX_COUNTS], *counts[-MAX_COUNTS:]}):
        order = open_orders(problem.request, stages, problem.micro_batches(size))[0]
        for mix in mixes(problem.devices, len(problem.graph) + 1, stages):
            cuts = cutter.smallest_peak(cut_request(problem, size, order[1], mix))
            for layout in layouts_of(problem, cuts):
                choice = Choice(layout, size, *order)
                plans.append((choice, evaluator.run(plan_of(problem, choice))))
    choice, plan = min(plans, key=lambda pair: problem.excess_bytes(pair[1]))
    return choice, ModeSearch(evaluator, offload).least_demanding(plan)


def infeasible(
    problem: Problem, plan: Plan, offload: tuple[bool, ...] = (False,)
) -> InfeasibleError:
    """The error to raise when no candidate fits.

    Args:
        plan: from :func:`least_demanding` with the same problem and ``offload``.
    """
    excess, rank, peak = _worst(problem, plan)
    limit, capture_bytes = problem.limit_bytes(rank), problem.profile.capture_bytes
    if capture_bytes > limit:
        return InfeasibleError(
            f"no feasible plan: every rank builds and captures the whole model, which takes "
            f"{format_bytes(capture_bytes)}, more than its limit of {format_bytes(limit)}",
            hint=f"{next(_hints(problem, plan, offload))}; or let each rank create only its own "
            "parameters: model.materialize: per_rank",
        )
    message = (
        f"no feasible plan: the one with the smallest peak needs "
        f"{format_bytes(peak)} on rank {rank} ({_breakdown(problem, plan, rank)}), "
        f"{format_bytes(excess)} more than its limit of {format_bytes(limit)}"
    )
    return InfeasibleError(message, hint="; ".join(_hints(problem, plan, offload)))


def _worst(problem: Problem, plan: Plan) -> tuple[float, int, int]:
    """The largest excess over a limit in bytes, the rank that has it, and the peak of this rank."""
    assert plan.prediction is not None
    peaks = plan.prediction.peak_memory_bytes
    excess = [peak - problem.limit_bytes(rank) for rank, peak in enumerate(peaks)]
    rank = max(range(len(excess)), key=lambda index: (excess[index], -index))
    return excess[rank], rank, peaks[rank]


def _samples_evaluated(problem: Problem, plan: Plan, rank: int) -> int | None:
    """The samples that are evaluated at once if a rank has its peak meanwhile; else None."""
    evaluation, heap_share = problem.request.evaluation, problem.profile.heap_share
    if evaluation is None or plan.prediction is None:
        return None
    peak = problem.baseline_bytes + round(float(evaluation_peaks(plan, heap_share)[rank]))
    has_peak = peak >= plan.prediction.peak_memory_bytes[rank]
    return evaluation.samples(plan.micro_batch_size) if has_peak else None


def _breakdown(problem: Problem, plan: Plan, rank: int) -> str:
    parts = [f"process {format_bytes(problem.baseline_bytes)}"]
    if (samples := _samples_evaluated(problem, plan, rank)) is not None:
        return f"{parts[0]}, the rest in an evaluation of {plural(samples, 'sample')} at once"
    for index in plan.stages_of_rank(rank):
        stage, in_flight = plan.stages[index], plan.warm_up[index]
        cost = stage.cost
        trained = cost.resident_bytes + cost.accumulated_bytes + cost.cast_bytes
        where, most = "in flight", in_flight
        if stage.offload:
            where, most = "on the device", min(in_flight, ON_THE_DEVICE)
        parts = [
            f"stage {index} of {len(plan.stages)}: {parts[0]}",
            f"parameters, gradients and optimizer {format_bytes(trained)}",
            f"{format_bytes(stage.kept_bytes)} for each micro-batch {where} "
            f"(at most {most}, of {plural(plan.micro_batch_size, 'sample')})",
        ]
        if stage.recompute:
            parts.append(f"{format_bytes(stage.running.saved_bytes)} for one that it recomputes")
    return ", ".join(parts)


def _hints(problem: Problem, plan: Plan, offload: tuple[bool, ...]) -> Iterator[str]:
    """Limits to raise, and changes that need less memory, each with the peak of the plan that then
    needs the least."""
    assert plan.prediction is not None
    peaks, (excess, rank, _) = plan.prediction.peak_memory_bytes, _worst(problem, plan)
    most, room, asked = max(peaks), [], problem.request.memory_limit_bytes
    if asked is not None and asked < most:
        size = ceil(most / 2**20) * (problem.request.memory_shared_by or 1)
        room.append(f"{problem.request.memory_key} {size}MiB")
    if any(peak > problem.cluster.memory_of(rank, None) for rank, peak in enumerate(peaks)):
        room.append(f"ranks with {ceil(most / 2**20)} MiB of memory")
    yield " and ".join(room) + " would be enough"
    if problem.limit_bytes(rank) <= problem.baseline_bytes:
        return
    cutter = Cutter(problem, CutSpace.plain(problem.graph))  # for more stages than were asked for
    for name, request, stages in _changes(problem, plan, rank):
        cluster = problem.cluster
        if stages > cluster.ranks:
            cluster = cluster.with_nodes(len(cluster.nodes) + stages).with_ranks(stages)
        changed = problem.on(cluster=cluster, request=request)
        _, smaller = least_demanding(changed, cutter, [stages], offload)
        missing, _, peak = _worst(changed, smaller)
        if missing < MAX_REST * excess:
            fits = "fits" if missing <= 0 else "still too much"
            yield f"{name}: about {format_bytes(peak)} ({fits})"


def _changes(problem: Problem, plan: Plan, rank: int) -> Iterator[tuple[str, PlanRequest, int]]:
    """(description, changed request, stages) of changes that a user could make.

    Args:
        rank: that exceeds its limit most.
    """
    request, stages = problem.request, len(plan.stages)
    samples, evaluation = _samples_evaluated(problem, plan, rank), request.evaluation
    for factor in (2, 8):
        if samples is not None and evaluation is not None and samples >= factor:
            fewer = evaluation._replace(asked=samples // factor)
            name = f"evaluation.batch_size {fewer.asked}"
            yield name, replace(request, evaluation=fewer), stages
    more = min(2 * stages, len(problem.graph))
    if more > stages:
        name = f"--devices {more}"
        if request.from_job and more <= problem.cluster.ranks:
            name = f"pipeline.stages {more}"
        elif request.from_job:
            name = f"{more} stages on {more} ranks"
        yield name, replace(request, stages=None, warm_up=None), more
    if request.schedule == GPIPE.name:
        yield f"schedule {ONE_F_ONE_B.name}", replace(request, schedule=ONE_F_ONE_B.name), stages
    for factor in (2, 4, 8):
        count = plan.micro_batches * factor
        if count > request.batch_size or not takes(request, ceil(request.batch_size / count)):
            continue
        if request.micro_batches is not None:
            name = f"pipeline.micro_batches {count}"
            yield name, replace(request, micro_batches=count), stages
