"""Schedules that no step flushes: which weights each action uses, and when steps are alike.

Steps overlap, so a rank updates after the last backward of a step, before that of the next, while
micro-batches of later steps wait for their backwards. From a moment at which the pipeline is empty
to the next is a *stretch*: evaluation and checkpoints end one. Versions of the weights are counted
by updates from the start of the stretch; the schedules say which one a step uses.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from pipectl.plan import Plan
from pipectl.schedule.actions import Actions, Integers, Kind
from pipectl.schedule.channel import carries_weights
from pipectl.schedule.order import Staleness
from pipectl.schedule.registry import schedule_of

_FIRST_SENDS_AWAITED = 3
"""Steps after which a rank awaits, in every step, a send of two messages before."""

_USES_WEIGHTS = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)


def versions_kept(plan: Plan, stage: int) -> int:
    """Of how many of the newest versions a forward or backward may ask on the rank that updates.

    Where forwards run there, too, they hold older versions that their backwards need by themselves.
    """
    apart = plan.stages[stage].ranks != plan.stages[stage].updating_ranks
    return _staleness(plan).kept(plan.warm_up[stage], apart)


def first_uses(plan: Plan, stage: int, micro_batches: int) -> Integers:
    """The first of a stretch's micro-batches to use each version that it uses in a stage."""
    steps = np.arange(micro_batches // plan.micro_batches)
    versions = _staleness(plan).version(plan.warm_up[stage], steps)
    uses: Integers = np.unique(versions, return_index=True)[1] * plan.micro_batches
    return uses


def with_versions(plan: Plan, rows: Actions) -> Actions:
    """Rows of a stretch of one rank, with the age of the weights that each uses."""
    kind, versions = rows.column("kind"), rows.rows.copy()
    users = np.flatnonzero(np.isin(kind, _USES_WEIGHTS))
    if len(users):
        stage = int(rows.column("stage")[users[0]])
        steps = rows.column("micro_batch")[users] // plan.micro_batches
        used = _staleness(plan).version(plan.warm_up[stage], steps)
        arrived = (kind == Kind.RECEIVE_WAIT) & carries_weights(plan, rows)
        made = np.cumsum(arrived) - 1 if arrived.any() else np.cumsum(kind == Kind.UPDATE)
        versions[users, -1] = made[users] - used
    return Actions(versions)


def steady_from(plan: Plan) -> int:
    """Steps of a stretch after which every rank does the same in each, with weights as old.

    A rank that only runs forwards waits for the next weights after the first that arrived.
    """
    apart = any(stage.backward_ranks for stage in plan.stages)
    return max(_FIRST_SENDS_AWAITED, _overlap(plan) + apart)


def steps_apart(plan: Plan) -> int:
    """Steps of a stretch besides those that are alike."""
    return steady_from(plan) + _overlap(plan) + 1


def _overlap(plan: Plan) -> int:
    """Steps that the deepest warm-up reaches into."""
    return ceil(max(plan.warm_up) / plan.micro_batches)


def _staleness(plan: Plan) -> Staleness:
    staleness = schedule_of(plan).staleness
    assert staleness is not None
    return staleness
