"""Costs of stages and messages at a micro-batch size.

Bytes are proportional to the size, except parameters. The time of a stage is the sum of its
operators' times, which depend on whether its data stays in the cache, and an overhead. The times of
the two halves of a split backward are assumptions, because profiles do not have them.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from pipectl.plan import Plan, Stage, StageCost, Transfer
from pipectl.planner.costs.footprint import Footprint
from pipectl.planner.costs.operator_times import Times
from pipectl.profile import Operator, Profile, StageOverhead
from pipectl.schedule import splits_backwards


def stage_costs(
    parts: Footprint, times: Times, scale: float, profile: Profile
) -> tuple[StageCost, ...]:
    """Cost of every stage.

    Args:
        times: of the operators at the micro-batch size.
        scale: micro-batch size over the profile's.
        profile: has the costs of the optimizer and of stages.
    """
    costs, optimizer = [], profile.optimizer_cost
    for index, members in enumerate(parts.members):
        parameter_bytes, memory = parts.parameter_bytes[index], parts.memory[index]
        forward_s, backward_s = stage_times(parts, index, times, scale, profile.stage)
        counts = [profile.operators[member].flops for member in members]
        state = optimizer.state_bytes_per_parameter_byte
        costs.append(
            StageCost(
                forward_s=forward_s,
                backward_s=backward_s,
                update_s=optimizer.step_s_per_byte * parameter_bytes,
                parameter_bytes=parameter_bytes,
                optimizer_bytes=ceil(state * memory.trained_bytes),
                saved_bytes=ceil(memory.saved * scale),
                gradient_bytes=memory.accumulated,
                buffer_bytes=memory.buffers,
                input_bytes=ceil(parts.received_bytes[index] * scale),
                peaks=memory.peaks(scale, profile.optimizer),
                flops=None if None in counts else round(sum(n or 0 for n in counts) * scale),
            )
        )
    return tuple(costs)


def stage_times(
    parts: Footprint, index: int, times: Times, scale: float, overhead: StageOverhead
) -> tuple[float, float]:
    """Forward and backward of a stage in seconds; without gradients there is no backward."""
    share = overhead.uncached(working_set_bytes(parts, index, scale))
    forward_s, backward_s = times.total(parts.members[index], share)
    more_forward_s, more_backward_s = parts.values[index].overhead_s(overhead)
    return forward_s + more_forward_s, backward_s + more_backward_s if backward_s else 0.0


def working_set_bytes(parts: Footprint, index: int, scale: float) -> float:
    """Bytes that a forward and backward touch: parameters, gradients, saved values."""
    return 2 * parts.parameter_bytes[index] + parts.memory[index].saved * scale


def scaled_transfers(parts: Footprint, scale: float) -> tuple[Transfer, ...]:
    """The messages at ``scale`` times the profile's micro-batch size."""
    return tuple(
        Transfer(item.kind, item.source, item.target, ceil(item.size_bytes * scale))
        for item in parts.transfers
    )


SPLIT = {
    *("linear", "addmm", "mm", "matmul", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
"""Operators whose backward is split: their ids in captured graphs, without the number at the end.
All others compute the gradients of their parameters in the first half."""
ASSUMED = (
    "backwards are split: gradients of parameters are taken as half of the backward of operators "
    "that multiply by them, which then keep what they save and the gradient of their output"
)


def with_halves(plan: Plan, profile: Profile) -> Plan:
    """A plan with the costs of both halves of backwards, if its schedule splits them."""
    if not splits_backwards(plan):
        return plan
    scale = plan.micro_batch_size / profile.micro_batch_size
    return replace(
        plan,
        stages=tuple(replace(stage, cost=_halved(stage, profile, scale)) for stage in plan.stages),
        assumptions=tuple(dict.fromkeys((*plan.assumptions, ASSUMED))),
    )


def _halved(stage: Stage, profile: Profile, scale: float) -> StageCost:
    operators = [profile.by_id[node] for node in stage.nodes]
    is_captured = profile.fingerprint is not None
    weighing = [
        operator
        for operator in operators
        if operator.parameters
        and (not is_captured or operator.id.rstrip("0123456789").rstrip("_") in SPLIT)
    ]
    total_s = sum(operator.backward_s for operator in operators)
    part = sum(operator.backward_s for operator in weighing) / total_s / 2 if total_s else 0.0
    return replace(
        stage.cost,
        weight_s=part * stage.cost.backward_s,
        deferred_bytes=ceil(_deferred_bytes(weighing) * scale),
    )


def _deferred_bytes(weighing: list[Operator]) -> int:
    """Bytes kept between the halves; a value that several operators read counts once."""
    inputs = dict(pair for operator in weighing for pair in operator.saved)
    return sum(inputs.values()) + sum(operator.gradient_bytes for operator in weighing)
