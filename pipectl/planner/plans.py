"""From a choice to its plan: stages with their costs, and messages. Nothing is simulated here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from pipectl.plan import Plan, Replication, Stage, StageCost
from pipectl.planner.costs.footprint import DEFAULT_BASELINE_BYTES, Footprint
from pipectl.planner.costs.model import PartitionCosts
from pipectl.planner.costs.stage_costs import ASSUMED
from pipectl.planner.partition.layout import Choice
from pipectl.planner.problem import Problem
from pipectl.planner.request import EvaluationSize
from pipectl.schedule import SCHEDULES
from pipectl.units import plural


def plan_of(problem: Problem, choice: Choice) -> Plan:
    """The plan of a choice, without a prediction."""
    request, size, layout = problem.request, choice.size, choice.layout
    count, listed = len(layout.partition), request.listed
    splits = listed.splits if listed else SCHEDULES[choice.schedule].splits_backward
    said = assumptions(problem, size)
    costs = problem.costs.of(layout.partition, size, splits=splits)
    shared: Sequence[StageCost] = costs.stages
    if choice.is_replicated or request.shard_optimizer:
        shared = _shared(problem, choice, costs, splits=splits)
    if request.evaluation is not None:
        shared = _evaluated(problem, request.evaluation, costs.footprint, shared, size)
    if request.correct_delay:  # the last update is kept as if it were a state of the optimizer
        shared = [
            replace(cost, optimizer_bytes=cost.optimizer_bytes + cost.changed_bytes)
            for cost in shared
        ]
    stages = zip(
        costs.footprint.nodes,
        layout.ranks,
        shared,
        choice.backward_ranks or ((),) * count,
        layout.recompute or (bool(request.recompute),) * count,
        strict=True,
    )
    return Plan(
        name=request.name,
        fingerprint=problem.profile.fingerprint,
        schedule=choice.schedule,
        warm_up=choice.warm_up,
        batch_size=request.batch_size,
        micro_batch_size=size,
        micro_batches=problem.micro_batches(size),
        stages=tuple(
            Stage(nodes, ranks, cost, backward_ranks, recompute=again)
            for nodes, ranks, cost, backward_ranks, again in stages
        ),
        transfers=costs.transfers,
        node_of_rank=problem.cluster.node_of_rank,
        memory_limit_bytes=request.memory_limit_bytes,
        key=request.key,
        offload_to=request.offload_to,
        replication=choice.replication,
        shard_optimizer=request.shard_optimizer,
        updates_together=request.updates_together,
        reproducible=request.reproducible,
        assumptions=(*said, ASSUMED) if splits and problem.profile.split is None else said,
    )


def _evaluated(
    problem: Problem,
    evaluation: EvaluationSize,
    parts: Footprint,
    stages: Sequence[StageCost],
    size: int,
) -> Sequence[StageCost]:
    """The costs of every stage with the peaks of evaluations, if peaks are known.

    While a stage computes a micro-batch, it still sends what it made of the one before.

    Args:
        size: of the micro-batches of the training.
    """
    scale = evaluation.samples(size) / problem.profile.micro_batch_size
    evaluated = []
    for stage, (cost, memory, crossing) in enumerate(
        zip(stages, parts.memory, parts.crossings, strict=True)
    ):
        if cost.peaks is not None:
            moving = parts.sums.received_bytes[0, stage].item()
            if evaluation.has_several(size):
                moving += sum(crossing.sent.values())
            peak = memory.evaluation_bytes(scale) + ceil(scale * moving)
            cost = replace(cost, peaks=replace(cost.peaks, evaluation_bytes=peak))
        evaluated.append(cost)
    return evaluated


def assumptions(problem: Problem, size: int) -> tuple[str, ...]:
    """Assumptions about micro-batches of ``size`` samples for want of measurements, and why
    their number is not as requested."""
    profile, request, measured = problem.profile, problem.request, problem.profile.micro_batch_size
    said = list(profile.assumptions)
    if profile.process_baseline_bytes is None:
        mebibytes = DEFAULT_BASELINE_BYTES >> 20
        said.append(f"a process without a stage takes {mebibytes} MiB")
    edge_sizes = profile.edge_bytes.items()
    if any(size != profile.by_id[source].output_bytes for (source, _), size in edge_sizes):
        said.append("a message has the output_bytes of its operator: edge_bytes are not used")
    said += problem.cluster.assumptions
    if size != measured and not profile.has_several_sizes:
        times = f"times of {plural(size, 'sample')}"
        said.append(f"{times} are taken as proportional to those of {measured}")
    count, copies = problem.micro_batches(size), request.replicas or 1
    if request.micro_batches not in (None, count):
        equally = f" and be shared evenly by {copies} replicas" if copies > 1 else ""
        said.append(
            f"{request.micro_batches} micro-batches of {request.batch_size} samples cannot be "
            f"of one size with a smaller last one{equally}: {count} of {size} samples instead"
        )
    return tuple(said)


def _shared(
    problem: Problem, choice: Choice, costs: PartitionCosts, *, splits: bool
) -> Sequence[StageCost]:
    """Costs of every stage; if micro-batches are split, with speed and peaks of the replica
    that has the largest part."""
    size, replicas, sharded = choice.size, choice.replicas, problem.request.shard_optimizer
    shared = []
    memory = costs.footprint.memory
    optimizer = problem.profile.optimizer_cost
    state = optimizer.state_bytes_per_parameter_byte
    for stage, (cost, count) in enumerate(zip(costs.stages, replicas, strict=True)):
        if choice.replication is Replication.SPLIT:
            samples = ceil(size / count)
            partial = problem.costs.of(choice.layout.partition, samples, splits=splits)
            part = partial.stages[stage].scaled(size / samples)
            cost = replace(
                cost,
                forward_s=part.forward_s,
                backward_s=part.backward_s,
                weight_s=part.weight_s,
                peaks=part.peaks,
            )
        if sharded:
            updated = memory[stage].updated_bytes(count)
            update_s = optimizer.step_s_per_byte * updated
            cost = replace(cost, optimizer_bytes=ceil(state * updated), update_s=update_s)
        shared.append(cost)
    return shared
