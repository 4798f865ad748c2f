"""The error for a job that does not fit: how much is missing, where, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from pipectl.errors import InfeasibleError
from pipectl.plan import Plan, StageCost, StagePeaks
from pipectl.planner.costs.devices import Mix, mixes, one_each, placements
from pipectl.planner.evaluate import predicted
from pipectl.planner.partition.cutter import CutRequest, Cutter, cut_request
from pipectl.planner.partition.layout import Choice, Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import PlanRequest, micro_batch_sizes, open_orders
from pipectl.schedule.gpipe import GPIPE
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B
from pipectl.units import format_bytes

MANY = 8
"""Numbers of stages: the fewest and the most of more are tried."""
Demand = tuple[Plan, tuple[int, ...]]
"""A plan and the peak of each of its ranks."""


def least_demanding(
    problem: Problem, cutter: Cutter, counts: Sequence[int]
) -> tuple[Choice, Demand]:
    """What was made for little memory and exceeds its limits least, or does not.

    Args:
        counts: numbers of stages that were allowed; more stages rarely need more memory.
    """
    request, demands = problem.request, []
    size = micro_batch_sizes(request, request.batch_size)[-1]
    again, states = request.recompute is not False, len(problem.graph) + 1
    for stages in sorted({*counts[:MANY], *counts[-MANY:]}):
        order = open_orders(request, stages, problem.micro_batches(size))[0]
        for mix in mixes(problem.devices, states, stages, stages):
            wanted = cut_request(problem, size, order[1], mix, recompute=again)
            for cut in cutter.smallest_peak(wanted):
                for placement in placements(problem.cluster, problem.devices, cut.kinds):
                    recompute = (True,) * stages if request.recompute else cut.recompute
                    layout = Layout(cut.partition, one_each(placement), recompute)
                    choice = Choice(layout, size, *order)
                    tried = predicted(problem.plan(choice), problem.cluster, problem.baseline_bytes)
                    assert tried.prediction is not None
                    demands.append((choice, (tried, tried.prediction.peak_memory_bytes)))
    return min(demands, key=lambda each: _worst(problem, each[1][1])[0])


def infeasible(problem: Problem, cutter: Cutter, demand: Demand) -> InfeasibleError:
    """The error to raise when no candidate fits, of the one that exceeds its limits least."""
    plan, peaks = demand
    excess, rank = _worst(problem, peaks)
    limit = problem.limit_bytes(rank)
    message = (
        f"no feasible plan: the one with the smallest peak needs "
        f"{format_bytes(peaks[rank])} on rank {rank} ({_breakdown(problem, plan, rank)}), "
        f"{format_bytes(excess)} more than its limit of {format_bytes(limit)}"
    )
    return InfeasibleError(message, cure="; ".join(_cures(problem, cutter, plan, peaks, rank)))


def _worst(problem: Problem, peaks: Sequence[int]) -> tuple[float, int]:
    """The largest excess over a limit, and its rank."""
    excess = [peak - problem.limit_bytes(rank) for rank, peak in enumerate(peaks)]
    rank = max(range(len(excess)), key=lambda index: (excess[index], -index))
    return excess[rank], rank


def _breakdown(problem: Problem, plan: Plan, rank: int) -> str:
    """What the memory of a rank consists of."""
    parts = [f"process {format_bytes(problem.baseline_bytes)}"]
    for index in plan.stages_of_rank(rank):
        stage = plan.stages[index]
        held = stage.cost.resident_bytes + stage.cost.accumulated_bytes
        parts = [
            f"stage {index} of {len(plan.stages)}: {parts[0]}",
            f"parameters, gradients and optimizer {format_bytes(held)}",
            f"{format_bytes(stage.kept_bytes)} for each micro-batch in flight "
            f"(at most {plan.warm_up[index]}, of {plan.micro_batch_size} samples)",
        ]
        if stage.recompute:
            parts.append(f"{format_bytes(stage.cost.saved_bytes)} for one that it recomputes")
    return ", ".join(parts)


def _cures(
    problem: Problem, cutter: Cutter, plan: Plan, peaks: Sequence[int], rank: int
) -> Iterator[str]:
    """What would have to be raised, and changes that need less memory, each with the peak it is
    estimated to have."""
    limit, most = problem.limit_bytes(rank), max(peaks)
    room, asked = [], problem.request.memory_limit_bytes
    if asked is not None and asked < most:
        room.append(f"{problem.request.named('memory_limit')} {ceil(most / 2**20)}MiB")
    if any(peak > problem.cluster.memory_of(rank, None) for rank, peak in enumerate(peaks)):
        room.append(f"ranks with {ceil(most / 2**20)} MiB of memory")
    yield " and ".join(room) + " would be enough"
    if limit <= problem.baseline_bytes:
        return
    now = _estimate(problem, cutter, problem.request, len(plan.stages), limit)
    for name, request, stages in _changes(problem, plan):
        peak = _estimate(problem, cutter, request, stages, limit)
        if peak < now:
            fits = "fits" if peak <= limit else "still too much"
            yield f"{name}: about {format_bytes(peak)} ({fits})"


def _changes(problem: Problem, plan: Plan) -> Iterator[tuple[str, PlanRequest, int]]:
    """(description, changed request, stages) of what a user could change."""
    request, stages = problem.request, len(plan.stages)
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
        if request.micro_batches is not None and count <= request.batch_size:
            name = f"{request.named('micro_batches')} {count}"
            yield name, replace(request, micro_batches=count), stages


def _estimate(
    problem: Problem, cutter: Cutter, request: PlanRequest, stages: int, limit: float
) -> int:
    """The smallest peak found under a changed request, without buffers of messages."""
    size = micro_batch_sizes(request, request.batch_size)[-1]
    _, warm_up = open_orders(request, stages, problem.micro_batches(size))[0]
    wanted = CutRequest(size, warm_up, Mix.ordered([0] * stages, 1), (limit,))
    return problem.baseline_bytes + min(
        max(map(_peak_bytes, problem.costs(cut.partition, size), warm_up))
        for cut in cutter.smallest_peak(wanted)
    )


def _peak_bytes(cost: StageCost, flying: int) -> int:
    """Of a stage that keeps what it saves, without buffers of messages."""
    peaks = cost.peaks or StagePeaks(0, 0, cost.accumulated_bytes, 0)
    backward = max(peaks.first_backward_bytes, cost.accumulated_bytes + peaks.backward_bytes)
    return cost.resident_bytes + flying * cost.saved_bytes + backward
