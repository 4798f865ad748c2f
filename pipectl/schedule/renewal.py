"""Between two steps: bringing the newest weights to ranks that run forwards only.

A step's program begins with that, too; an evaluation has a program of its own.
"""

from __future__ import annotations

from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.schedule.actions import Action, Actions, Kind, Program
from pipectl.schedule.channel import channels_of_rank


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
