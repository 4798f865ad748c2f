"""Resident memory of a stage: what is there all the time, and what each micro-batch in flight adds.

    peak = process + parameters + gradients + optimizer state + in flight x saved

These are the parts that no order of actions avoids, so their sum is a lower bound on the peak;
the simulator adds the buffers of messages under way.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.plan import Plan, StageCost


def resident_bytes(cost: StageCost) -> int:
    """Parameters, their gradients and the optimizer's state."""
    return 2 * cost.parameter_bytes + cost.optimizer_bytes


def peak_bytes(plan: Plan, stage: int, baseline_bytes: int) -> float:
    """Lower bound on the memory of the rank that holds a stage."""
    cost = plan.stages[stage].cost
    in_flight = sum(plan.micro_batch_shares[: plan.warm_up[stage]])
    return baseline_bytes + resident_bytes(cost) + in_flight * cost.saved_bytes


def largest_peak_bytes(
    costs: Sequence[StageCost], warm_up: Sequence[int], baseline_bytes: int
) -> int:
    """The same for the most demanding of some stages, when every micro-batch is full."""
    return baseline_bytes + max(
        resident_bytes(cost) + depth * cost.saved_bytes
        for cost, depth in zip(costs, warm_up, strict=True)
    )
