"""What the two halves of a split backward take, where no profile says."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from pipectl.plan import Plan, Stage, StageCost
from pipectl.profile import Operator, Profile
from pipectl.schedule import splits_backwards

ASSUMED = (
    "backwards are split: gradients of parameters are taken as half of the backward of operators "
    "that have any, which then keep what they save and the gradient of their output"
)


def with_halves(plan: Plan, profile: Profile) -> Plan:
    """With the cost of both halves of each stage, if the plan's schedule splits backwards."""
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
    weighing = [operator for operator in operators if operator.parameters]
    total_s = sum(operator.backward_s for operator in operators)
    part = sum(operator.backward_s for operator in weighing) / total_s / 2 if total_s else 0.0
    return replace(
        stage.cost,
        weight_s=part * stage.cost.backward_s,
        deferred_bytes=ceil(_deferred_bytes(weighing) * scale),
    )


def _deferred_bytes(weighing: list[Operator]) -> int:
    """Kept between the halves: a value that several operators read counts once."""
    inputs = dict(pair for operator in weighing for pair in operator.saved)
    return sum(inputs.values()) + sum(operator.gradient_bytes for operator in weighing)
