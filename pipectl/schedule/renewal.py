"""Bringing weights to ranks that run forwards only, from where they are updated.

A flushed step begins with that; an evaluation has a program of its own. Where steps are not
flushed, each version follows the update that made it, and is awaited before the first forward that
uses it: which one that is, the schedule says, not the speed of the network.
"""

from __future__ import annotations

import numpy as np

from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.schedule.actions import Action, Actions, Integers, Kind, Program
from pipectl.schedule.channel import channels_of_rank
from pipectl.schedule.placement import Portion
from pipectl.schedule.unflushed import first_uses, is_unflushed


def renewals(plan: Plan, stage: int, micro_batches: int) -> Portion:
    """The messages of weights of a stage in a step, or a stretch of steps that are not flushed.

    Each belongs to the last micro-batch of the update that made its version; the first, with what a
    step or stretch begins with, to none (-1).
    """
    uses = renewed(plan, stage, micro_batches)
    return Portion(np.arange(len(uses)) * plan.micro_batches - 1)


def renewed(plan: Plan, stage: int, micro_batches: int) -> Integers:
    """The first micro-batch of those that use each of the weights that :func:`renewals` bring."""
    if not is_unflushed(plan):
        return np.zeros(1, dtype=np.int64)
    return first_uses(plan, stage, micro_batches // plan.micro_batches) * plan.micro_batches


def lower_renewal(plan: Plan, rank: int) -> Program:
    """What a rank does so that every forward has the weights that its backward's rank updated.

    All messages are started before any is awaited, so no ranks wait for each other.
    """
    starts, waits = [], []
    for index, channel in channels_of_rank(plan, rank):
        if channel.kind is TransferKind.WEIGHT:
            sends = channel.source_rank == rank
            stage = channel.source_stage
            start = Kind.SEND_START if sends else Kind.RECEIVE_START
            wait = Kind.SEND_WAIT if sends else Kind.RECEIVE_WAIT
            starts.append(Action(start, stage, channel=index))
            waits.append(Action(wait, stage, channel=index))
    return Program(Actions.of([*starts, *waits]))
