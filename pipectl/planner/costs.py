"""What stages and messages cost at a micro-batch size.

Bytes are proportional to the size, except parameters. A stage takes what its operators take, which
depends on whether its data stays in the cache, and an overhead of its own.
"""

from __future__ import annotations

from math import ceil

from pipectl.plan import StageCost, Transfer
from pipectl.planner.memory.footprint import Footprint
from pipectl.planner.operator_times import Times
from pipectl.profile import Profile, StageOverhead


def stage_costs(
    parts: Footprint, times: Times, scale: float, profile: Profile
) -> tuple[StageCost, ...]:
    """Cost of every stage.

    Args:
        times: of the operators at the micro-batch size.
        scale: micro-batch size over the profile's.
        profile: for what optimizer and stages cost.
    """
    return tuple(
        _stage_cost(parts, index, times, scale, profile) for index in range(len(parts.members))
    )


def _stage_cost(
    parts: Footprint, index: int, times: Times, scale: float, profile: Profile
) -> StageCost:
    optimizer = profile.optimizer_cost
    parameter_bytes, memory = parts.parameter_bytes[index], parts.memory[index]
    forward_s, backward_s = stage_times(parts, index, times, scale, profile.stage)
    return StageCost(
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=optimizer.step_s_per_byte * parameter_bytes,
        parameter_bytes=parameter_bytes,
        optimizer_bytes=ceil(optimizer.state_bytes_per_parameter_byte * memory.trained_bytes),
        saved_bytes=ceil(memory.saved * scale),
        gradient_bytes=memory.accumulated,
        buffer_bytes=memory.buffers,
        input_bytes=ceil(parts.received_bytes[index] * scale),
        peaks=memory.peaks(scale, profile.optimizer),
    )


def stage_times(
    parts: Footprint, index: int, times: Times, scale: float, overhead: StageOverhead
) -> tuple[float, float]:
    """Forward and backward of a stage; a stage without any gradient has no backward."""
    share = overhead.uncached(working_set_bytes(parts, index, scale))
    forward_s, backward_s = times.total(parts.members[index], share)
    more_forward_s, more_backward_s = parts.values[index].overhead_s(overhead)
    return forward_s + more_forward_s, backward_s + more_backward_s if backward_s else 0.0


def working_set_bytes(parts: Footprint, index: int, scale: float) -> float:
    """What a stage touches in a forward and backward: parameters, gradients, saved values."""
    return 2 * parts.parameter_bytes[index] + parts.memory[index].saved * scale


def scaled_transfers(parts: Footprint, scale: float) -> tuple[Transfer, ...]:
    """The messages at ``scale`` times the profile's micro-batch size."""
    return tuple(
        Transfer(item.kind, item.source, item.target, ceil(item.size_bytes * scale))
        for item in parts.transfers
    )
