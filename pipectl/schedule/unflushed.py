"""Schedules without flushes: the weights that each action uses, and the steady state.

Steps overlap, so a rank updates between the last backward of a step and that of the next, while
micro-batches of later steps wait for their backwards. A *stretch* lasts from one moment at which
the pipeline is empty to the next; evaluation and checkpoints end a stretch. Versions of the weights
count updates from the start of the stretch; the schedule defines which version a step uses.
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
"""Steps after which a rank waits in every step for the send of two messages before."""

_USES_WEIGHTS = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)


def versions_kept(plan: Plan, stage: int) -> int:
    """Return how many of the newest versions may be requested on the rank that updates.

    If forwards run on the same rank, they hold the older versions that their backwards need.
    """
    apart = plan.stages[stage].ranks != plan.stages[stage].updating_ranks
    return _staleness(plan).kept(plan.warm_up[stage], apart)


def first_uses(plan: Plan, stage: int, micro_batches: int) -> Integers:
    """Return the first micro-batch of a stretch that uses each version in a stage."""
    steps = np.arange(micro_batches // plan.micro_batches)
    versions = _staleness(plan).version(plan.warm_up[stage], steps)
    uses: Integers = np.unique(versions, return_index=True)[1] * plan.micro_batches
    return uses


def with_versions(plan: Plan, rows: Actions) -> Actions:
    """Return the rows of a stretch of one rank, with the age of the weights that each uses."""
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
    """Return the number of steps of a stretch before the steady ones, which are all the same.

    A rank that only runs forwards waits for the next weights after the first that arrived.
    """
    apart = any(stage.backward_ranks for stage in plan.stages)
    return max(_FIRST_SENDS_AWAITED, _overlap(plan) + apart)


def steps_apart(plan: Plan) -> int:
    """Return the number of steps of a stretch that are not steady."""
    return steady_from(plan) + _overlap(plan) + 1


def _overlap(plan: Plan) -> int:
    """Return the number of steps that the longest warm-up covers."""
    return ceil(max(plan.warm_up) / plan.micro_batches)


def _staleness(plan: Plan) -> Staleness:
    staleness = schedule_of(plan).staleness
    assert staleness is not None
    return staleness
