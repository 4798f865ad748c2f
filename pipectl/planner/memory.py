"""Memory of a stage's rank that no order of actions avoids: plans above a limit are dropped.

    peak = process + parameters + buffers + optimizer state + micro-batches in flight
                   + gradients of the parameters, from the first backward on
                   + what the action that runs holds for itself

The simulator adds the buffers of messages under way.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.plan import Plan, StageCost, StagePeaks


def peak_bytes(plan: Plan, stage: int, baseline_bytes: int) -> float:
    """Lower bound on the memory of the rank that holds a stage."""
    cost = plan.stages[stage].cost
    shares = plan.micro_batch_shares[: plan.warm_up[stage]]
    return baseline_bytes + _held_bytes(cost, shares, plan.micro_batches > len(shares))


def largest_peak_bytes(
    costs: Sequence[StageCost], warm_up: Sequence[int], baseline_bytes: int, micro_batches: int
) -> int:
    """The same for the most demanding of some stages, when every micro-batch is full."""
    return baseline_bytes + max(
        round(_held_bytes(cost, (1.0,) * depth, micro_batches > depth))
        for cost, depth in zip(costs, warm_up, strict=True)
    )


def _held_bytes(cost: StageCost, shares: Sequence[float], goes_on: bool) -> float:
    """The most a stage holds, messages of its neighbours left out.

    Args:
        shares: sizes of the micro-batches in flight, relative to a full one.
        goes_on: whether forwards follow the first backward, which makes the gradients.
    """
    saved, last = sum(shares) * cost.saved_bytes, shares[0] * cost.saved_bytes
    gradients = cost.accumulated_bytes
    peaks = cost.peaks or StagePeaks(0, 0, gradients, 0)
    later = gradients if goes_on else 0  # there in the last forward of a full pipeline
    return cost.resident_bytes + max(
        later + saved,
        later + saved - last + peaks.forward_bytes,
        saved + peaks.first_backward_bytes,
        gradients + (saved if goes_on else saved - last) + peaks.backward_bytes * (len(shares) > 1),
        gradients + peaks.update_bytes,
    )
