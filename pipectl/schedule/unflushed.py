"""Schedules that no step flushes: what their plans must be, and which weights each action uses.

Steps overlap, so a rank updates behind the last backward of a step, before that of the next, while
micro-batches of later steps wait for their backwards. From a moment at which the pipeline is empty
to the next is a *stretch*: evaluation and checkpoints end one. Versions of the weights are counted
by updates from the start of the stretch; the schedules say which one a step uses.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from pipectl.errors import ScheduleError
from pipectl.plan import Plan
from pipectl.schedule import pipedream, pipedream_2bw
from pipectl.schedule.actions import Actions, Integers, Kind
from pipectl.schedule.channel import carries_weights

NAMES = (pipedream.NAME, pipedream_2bw.NAME)
_FIRST_SENDS_AWAITED = 3
"""Steps after which a rank awaits, in every step, a send of two messages before."""

_USES_WEIGHTS = (
    Kind.FORWARD,
    Kind.RECOMPUTE,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
)


def is_unflushed(plan: Plan) -> bool:
    """Whether steps overlap, so that gradients are of older weights than they update."""
    return plan.schedule in NAMES


def check(plan: Plan) -> None:
    """Refuse what no formula for the versions is known for.

    Raises:
        ScheduleError: replicas, several stages on a rank, warm-ups that the schedule cannot have,
            or several micro-batches in a PipeDream step.
    """
    ranks = [rank for stage in plan.stages for rank in {*stage.ranks, *stage.updating_ranks}]
    if len(set(ranks)) < len(ranks) or any(stage.replicas > 1 for stage in plan.stages):
        raise _refusal(
            plan,
            "takes one stage a rank and one rank a stage, or two where the backward is apart",
            "leave replicas out, and give each stage ranks of its own",
        )
    if plan.schedule == pipedream.NAME and plan.micro_batches > 1:
        raise _refusal(
            plan,
            f"updates behind every micro-batch, but a step has {plan.micro_batches}",
            f"use one micro-batch, or schedule {pipedream_2bw.NAME}",
        )
    if plan.schedule == pipedream_2bw.NAME and max(plan.warm_up) > plan.micro_batches:
        raise _refusal(
            plan,
            f"has a warm-up of at most the {plan.micro_batches} micro-batches of a step, "
            f"not {max(plan.warm_up)}",
            "lower warm_up",
        )


def version_of(plan: Plan, stage: int, steps: Integers) -> Integers:
    """The version that all forwards and backwards of some steps use, counted from the stretch.

    Args:
        steps: from 0, the first of the stretch.
    """
    if plan.schedule == pipedream.NAME:
        return pipedream.version(plan.warm_up[stage], steps)
    return pipedream_2bw.version(steps)


def versions_kept(plan: Plan, stage: int) -> int:
    """Of how many of the newest versions a forward or backward may ask on the rank that updates.

    Where forwards run there, too, they hold older versions that their backwards need by themselves.
    """
    if plan.schedule == pipedream_2bw.NAME:
        return 2
    apart = plan.stages[stage].ranks != plan.stages[stage].updating_ranks
    return plan.warm_up[stage] if apart else 1


def first_uses(plan: Plan, stage: int, steps: int) -> Integers:
    """The first of some steps to use each version, for all versions that they use."""
    found: Integers = np.unique(version_of(plan, stage, np.arange(steps)), return_index=True)[1]
    return found


def with_versions(plan: Plan, rows: Actions) -> Actions:
    """Rows of a stretch of one rank, with the age of the weights that each uses."""
    kind, found = rows.column("kind"), rows.rows.copy()
    users = np.flatnonzero(np.isin(kind, _USES_WEIGHTS))
    if len(users):
        stage = int(rows.column("stage")[users[0]])
        steps = rows.column("micro_batch")[users] // plan.micro_batches
        found[users, -1] = _newest(plan, rows)[users] - version_of(plan, stage, steps)
    return Actions(found)


def _newest(plan: Plan, rows: Actions) -> Integers:
    """The newest version on a rank by every row: made there, or arrived."""
    kind = rows.column("kind")
    arrived = (kind == Kind.RECEIVE_WAIT) & carries_weights(plan, rows)
    found: Integers = np.cumsum(arrived) - 1 if arrived.any() else np.cumsum(kind == Kind.UPDATE)
    return found


def overlap(plan: Plan) -> int:
    """Steps that the deepest warm-up reaches into."""
    return ceil(max(plan.warm_up) / plan.micro_batches)


def steady_from(plan: Plan) -> int:
    """Steps of a stretch after which every rank does the same in each, with weights as old.

    A rank that only runs forwards waits for the next weights from behind the first that arrived.
    """
    apart = any(stage.backward_ranks for stage in plan.stages)
    return max(_FIRST_SENDS_AWAITED, overlap(plan) + apart)


def steps_apart(plan: Plan) -> int:
    """Steps of a stretch besides those that bodies are."""
    return steady_from(plan) + overlap(plan) + 1


def updates(rows: Actions) -> Integers:
    """The rows that end a step."""
    found: Integers = np.flatnonzero(rows.column("kind") == Kind.UPDATE)
    return found


def _refusal(plan: Plan, what: str, cure: str) -> ScheduleError:
    return ScheduleError(f"schedule {plan.schedule}: {what}", cure=cure)
