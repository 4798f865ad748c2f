"""Lowering: from what a rank computes to what it does, messages included.

Around each compute action stand, in this order::

    RECEIVE_START   of a message that is consumed ``ahead`` messages later
    RECEIVE_WAIT    for what the action reads
    SEND_WAIT       for the activations whose memory a backward is about to release
    the action
    SEND_WAIT       for an earlier message of the same channel, usually two before
    SEND_START      of what the action made

so a receive is in place before its message can arrive, a send starts at once, and a wait comes
as late as the memory of its buffer allows: an activation is sent from the values that its
backward needs anyway, and few gradients of a channel are on their way at once. All is done before
UPDATE.

How many gradients: the receiver starts to receive micro-batch i before its backward of i - 1. In
the order of all ranks' actions by which schedules are generated (see ``one_f_one_b``) that comes
before the sender's backward of i + k if k is at least the difference of their warm-ups; so with k
gradients on their way no wait can close a circle, whatever the placement.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np

from pipectl import __version__
from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.schedule import evaluation
from pipectl.schedule.actions import Actions, Columns, Integers, Kind, Program
from pipectl.schedule.catalogue import compute_actions
from pipectl.schedule.channel import Channel, channels

RECEIVE_AHEAD = 1
"""Double buffering: the next message can arrive while one is waited for and used."""
SENDS_ON_THE_WAY = 2
"""At least, on a channel without backwards to wait for: one moves while the next is made."""

MOVES = {
    Kind.FORWARD: TransferKind.ACTIVATION,
    Kind.EVALUATE: TransferKind.ACTIVATION,
    Kind.BACKWARD: TransferKind.GRADIENT,
    Kind.BACKWARD_INPUT: TransferKind.GRADIENT,
}
"""The messages a compute action reads from the channels into its stage and writes to those out."""

_RECEIVE_START, _RECEIVE_WAIT, _RELEASE, _COMPUTE, _SEND_WAIT, _SEND_START, _UPDATE = range(7)


def lower(
    plan: Plan, rank: int, micro_batches: int | None = None, *, receive_ahead: int = RECEIVE_AHEAD
) -> Program:
    """The program of one rank; costs time in proportion to that rank's actions.

    Every rank gets exactly one UPDATE, the last row, with its first stage, or -1 if it has none:
    idle ranks take part in what all ranks do together at the end of a step.

    Args:
        micro_batches: of this step; by default the plan's.
        receive_ahead: receives posted on a channel beyond the one whose message is next.

    Raises:
        ScheduleError: for an unknown schedule or a stage with replicas.
    """
    compute = compute_actions(plan, rank, micro_batches)
    lowering = _Lowering(compute, receive_ahead, plan.warm_up)
    lowering.add_channels(channels(plan), rank)
    stages = plan.stages_of_rank(rank)
    lowering.add(_UPDATE, [len(compute)], Kind.UPDATE, stages[0] if stages else -1, [-1], -1)
    return Program(lowering.finish())


def lower_evaluation(
    connections: Sequence[Channel],
    stages: Sequence[int],
    rank: int,
    micro_batches: int,
    *,
    receive_ahead: int = RECEIVE_AHEAD,
) -> Program:
    """The forward-only program of one rank, without UPDATE.

    Args:
        connections: channels of the evaluation graph; the program holds their indices.
        stages: stages of this rank.
    """
    lowering = _Lowering(evaluation.generate(stages, micro_batches), receive_ahead)
    lowering.add_channels(connections, rank)
    return Program(lowering.finish())


def program_hash(plan: Plan) -> str:
    """Hash of all that the programs of a plan follow from; ranks compare it at their start."""
    content = [
        __version__,
        plan.schedule,
        plan.warm_up,
        [plan.batch_size, plan.micro_batch_size, plan.micro_batches],
        [stage.ranks for stage in plan.stages],
        [astuple(channel) for channel in channels(plan)],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class _Lowering:
    """Rows of one program, each placed at a slot (index of a compute action) and a phase."""

    def __init__(
        self, compute: Actions, receive_ahead: int, warm_up: Sequence[int] | None = None
    ) -> None:
        self.compute = compute
        self.receive_ahead = receive_ahead
        self.warm_up = warm_up
        self.places: list[Integers] = []
        self.rows: list[Columns] = []
        self._place(_COMPUTE, np.arange(len(compute)), compute.rows)

    def add_channels(self, connections: Sequence[Channel], rank: int) -> None:
        """The messages of every channel that starts or ends here and leaves the rank."""
        for index, channel in enumerate(connections):
            if channel.is_local:
                continue
            if channel.source_rank == rank:
                self._add_sends(index, channel)
            if channel.target_rank == rank:
                self._add_receives(index, channel)

    def add(
        self,
        phase: int,
        slots: Sequence[int] | Integers,
        kind: Kind,
        stage: int,
        micro_batches: Sequence[int] | Integers,
        channel: int,
    ) -> None:
        """Rows of one kind, stage and channel."""
        count = len(slots)
        added = Actions.of_columns(
            kind=np.full(count, kind, dtype=np.int32),
            stage=np.full(count, stage, dtype=np.int32),
            micro_batch=np.asarray(micro_batches, dtype=np.int32),
            channel=np.full(count, channel, dtype=np.int32),
        )
        self._place(phase, np.asarray(slots), added.rows)

    def finish(self) -> Actions:
        """All rows by slot and phase, then by channel and the order of its messages."""
        places, rows = np.concatenate(self.places), np.concatenate(self.rows)
        return Actions(rows[np.lexsort((places[:, 1], places[:, 0]))])

    def _place(self, phase: int, slots: Integers, rows: Columns) -> None:
        self.places.append(np.column_stack([slots, np.full(len(slots), phase)]))
        self.rows.append(rows)

    def _add_receives(self, index: int, channel: Channel) -> None:
        slots, micro_batches = self._users(channel.kind, channel.target_stage)
        early = np.concatenate([np.zeros(self.receive_ahead, dtype=slots.dtype), slots])
        for phase, kind, places in (
            (_RECEIVE_START, Kind.RECEIVE_START, early[: len(slots)]),
            (_RECEIVE_WAIT, Kind.RECEIVE_WAIT, slots),
        ):
            self.add(phase, places, kind, channel.target_stage, micro_batches, index)

    def _add_sends(self, index: int, channel: Channel) -> None:
        stage = channel.source_stage
        slots, micro_batches = self._users(channel.kind, stage)
        self.add(_SEND_START, slots, Kind.SEND_START, stage, micro_batches, index)
        back, back_micro_batches = self._users(TransferKind.GRADIENT, stage)
        if channel.kind is TransferKind.ACTIVATION and len(back):
            self.add(_RELEASE, back, Kind.SEND_WAIT, stage, back_micro_batches, index)
            return
        most = self._sends_on_the_way(channel)
        end = np.full(most, len(self.compute), dtype=slots.dtype)
        late = np.concatenate([slots, end])[most:]
        self.add(_SEND_WAIT, late, Kind.SEND_WAIT, stage, micro_batches, index)

    def _sends_on_the_way(self, channel: Channel) -> int:
        if self.warm_up is None:
            return SENDS_ON_THE_WAY
        depths = self.warm_up[channel.target_stage], self.warm_up[channel.source_stage]
        return max(SENDS_ON_THE_WAY, depths[0] - depths[1])

    def _users(self, moved: TransferKind, stage: int) -> tuple[Integers, Columns]:
        """Slots and micro-batches of the actions of a stage that read and write such messages."""
        kinds = [kind for kind, moves in MOVES.items() if moves is moved]
        mine = np.isin(self.compute.column("kind"), kinds)
        slots = np.flatnonzero(mine & (self.compute.column("stage") == stage))
        return slots, self.compute.column("micro_batch")[slots]
