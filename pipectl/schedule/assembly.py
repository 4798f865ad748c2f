"""Where the rows of messages, copies and sums stand among the computations of a rank.

Around each computation stand, in this order::

    RECEIVE_START   of a message that is consumed ``RECEIVE_AHEAD`` messages later
    FETCH_START     of what the next computation needs
    RECEIVE_WAIT    for saved values, FETCH_WAIT, RECOMPUTE: what a backward starts from
    RECEIVE_WAIT    for what else the computation reads
    RECEIVE_START   of the weights after those that have just arrived
    SEND_WAIT       for the activations whose memory a backward is about to release
    the computation
    SEND_WAIT       for an earlier message of the same channel, usually two before
    OFFLOAD_WAIT    for what the computation before saved
    SEND_START      of what the computation made
    RECEIVE_WAIT    for saved values that are offloaded until their backward
    OFFLOAD_START   of what the computation saved, or of these
    REDUCE_START    after the last backward of a stage with several replicas

so a receive is in place before its message can arrive, a send starts at once, and a wait comes
as late as the memory of its buffer allows: an activation is sent from the values that its
backward needs anyway, and few other messages of a channel are on their way at once. All is done
before UPDATE. Where a schedule splits backwards, their input halves receive, recompute, release and
send; gradients are summed after the last weight half.

Why no wait can close a circle: all ranks compute in one order (see ``order``), in which a receive
starts by the turn of the computation that it is posted before. A send is awaited after a later
turn, and by then, in that order, its receive has started. Reductions are awaited at the end only.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl.graph import TransferKind
from pipectl.schedule.actions import Action, Actions, Integers, Kind
from pipectl.schedule.channel import Channel
from pipectl.schedule.order import Order
from pipectl.schedule.placement import Column, Portion

RECEIVE_AHEAD = 1
"""Receives posted on a channel beyond the one whose message is next. Double buffering: the next
message can arrive while one is waited for and used."""
SENDS_ON_THE_WAY = 2
"""At least, on a channel without backwards to wait for: one moves while the next is made."""
SAVED_ON_THE_WAY = 1
"""The same for saved values, which are large: one moves during the next forward."""
COPIED_BESIDE = 1
"""Computations during which a copy to or from the host runs."""
_WITHIN = 4
"""Rows per micro-batch of saved values that arrive and leave while a rank waits to compute."""
_ONCE = Portion(np.array([-1]))
"""Of a row that belongs to no micro-batch."""


class Phase(IntEnum):
    """The order of what stands around the computation of a slot."""

    RECEIVE_START = 0
    FETCH_START = 1
    RECEIVE_SAVED = 2
    FETCH_WAIT = 3
    RECOMPUTE = 4
    RECEIVE_WAIT = 5
    RECEIVE_NEXT = 6
    RELEASE = 7
    COMPUTE = 8
    SEND_WAIT = 9
    OFFLOAD_WAIT = 10
    SEND_START = 11
    RECEIVE_OFFLOADED = 12
    OFFLOAD_START = 13
    REDUCE_START = 14
    REDUCE_WAIT = 15
    UPDATE = 16
    RENEW = 17


class Block(NamedTuple):
    """The actions of one kind and stage by rising micro-batch, and the slot of each."""

    portion: Portion
    slots: Integers

    def slots_of(self, micro_batches: Integers) -> Integers:
        """Slots of some of its micro-batches."""
        if len(micro_batches) == len(self.slots):
            return self.slots
        slots: Integers = self.slots[np.searchsorted(self.portion.micro_batches, micro_batches)]
        return slots


class Assembly:
    """Puts the rows of one program together. A *slot* is the place of a computation of the rank.

    Args:
        parts: what the rank computes, by kind and stage.
        micro_batches: of the step, or of the steps that are lowered as one.
    """

    def __init__(
        self,
        rank: int,
        parts: Sequence[tuple[Kind, int, Portion]],
        order: Order,
        micro_batches: int,
    ) -> None:
        self._rank, self._order, self._micro_batches = rank, order, micro_batches
        self._rows: list[tuple[Integers, int, Column, tuple[Column, ...]]] = []
        none = np.zeros(0, dtype=np.int64)
        each = [order.turns(kind, stage, mine.micro_batches) for kind, stage, mine in parts]
        turns = np.concatenate([none, *each])
        by_turn = turns.argsort()
        slots = np.empty_like(by_turn)
        slots[by_turn] = np.arange(len(turns))
        self._turns, self._end = turns[by_turn], len(turns)
        self._blocks: dict[tuple[Kind, int], Block] = {}
        first = 0
        for kind, stage, mine in parts:
            last = first + len(mine.micro_batches)
            self._blocks[kind, stage] = Block(mine, slots[first:last])
            self._add(Phase.COMPUTE, slots[first:last], kind, stage, mine)
            first = last

    def sorted(self) -> Actions:
        """All rows by slot and phase; those of one slot and phase as they were added."""
        total = sum(len(slots) for slots, *_ in self._rows)
        rows = np.empty((total, len(Action._fields)), dtype=np.int32)
        places, order = np.empty((2, total), dtype=np.int64)
        first = 0
        for slots, phase, within, values in self._rows:
            part = slice(first, first := first + len(slots))
            places[part], order[part] = slots * len(Phase) + phase, within
            for position, value in enumerate(values):
                rows[part, position] = value
        return Actions(rows[np.lexsort((order, places))])

    def add_messages(
        self, index: int, channel: Channel, portion: Portion, *, kept: bool, offload: bool = False
    ) -> None:
        """The messages of a channel that starts or ends at this rank and leaves it.

        Args:
            portion: what they hold.
            kept: whether the sender holds it until its backward anyway.
            offload: whether the receiver offloads it until its backward.
        """
        if channel.source_rank == self._rank:
            self._add_sends(index, channel, portion, kept)
        if channel.target_rank == self._rank:
            self._add_receives(index, channel, portion, offload=offload)

    def add_weights(
        self, index: int, channel: Channel, uses: Integers | None, micro_batches: int
    ) -> None:
        """The messages of weights, from where they were updated.

        A step begins with one. In a stretch of steps, each belongs to the last micro-batch of the
        update that made its version; the first, with what the stretch begins with, to none (-1).

        Args:
            uses: the first micro-batch to use each of them; None for a step alone.
            micro_batches: of a step.
        """
        made = np.arange(1 if uses is None else len(uses)) * micro_batches - 1
        portion, later = Portion(made), Portion(made[1:])
        if channel.source_rank == self._rank:
            stage, slots = channel.source_stage, np.array([self._end])
            self._add(Phase.RECEIVE_START, 0, Kind.SEND_START, stage, channel=index)
            if uses is not None:
                back = self._blocks[Kind.BACKWARD, stage]
                renew = back.slots_of(made[1:])
                self._add(Phase.RENEW, renew, Kind.SEND_START, stage, later, channel=index)
                slots = back.slots_of(made + micro_batches)
            self._add(Phase.SEND_WAIT, slots, Kind.SEND_WAIT, stage, portion, channel=index)
            return
        stage = channel.target_stage
        forward = self._blocks[Kind.FORWARD, stage]
        slots = np.append(forward.slots, self._end)[:1] if uses is None else forward.slots_of(uses)
        start, following = Kind.RECEIVE_START, slots[:-1]
        self._add(Phase.RECEIVE_START, 0, start, stage, channel=index)
        self._add(Phase.RECEIVE_NEXT, following, start, stage, later, channel=index)
        self._add(Phase.RECEIVE_WAIT, slots, Kind.RECEIVE_WAIT, stage, portion, channel=index)

    def add_stage(
        self, stage: int, *, elsewhere: bool, recompute: bool, offload: bool, reduce: bool
    ) -> None:
        """What the backward of a stage on this rank needs, and the sum of its gradients.

        Args:
            elsewhere: whether its forwards have another rank.
        """
        back = self._backward(stage)
        if recompute:
            self._add(Phase.RECOMPUTE, back.slots, Kind.RECOMPUTE, stage, back.portion)
        if offload and elsewhere:
            arrivals = self._arrivals(stage, back.portion)
            self._add_offload(stage, arrivals, back, early=_early(arrivals))
        elif offload:
            begun = self._blocks[Kind.FORWARD, stage].slots
            self._add_offload(stage, begun, back, early=np.zeros(len(begun), dtype=bool))
        if reduce:
            slots = self._blocks[self._order.last_half, stage].slots
            last = int(slots.max()) if len(slots) else self._end
            self._add(Phase.REDUCE_START, last, Kind.REDUCE_START, stage)
            self._add(Phase.REDUCE_WAIT, self._end, Kind.REDUCE_WAIT, stage)

    def add_updates(self, stage: int, micro_batches: int | None) -> None:
        """UPDATE, at the end of the step, or after the last backward of every step of a stretch.

        Args:
            stage: -1 for a rank that updates none: after the last forward, if it has any.
            micro_batches: of each step of a stretch; None for a step alone.
        """
        if micro_batches is None:
            self._add(Phase.UPDATE, self._end, Kind.UPDATE, stage)
            return
        block = self._blocks.get((Kind.BACKWARD, stage), next(iter(self._blocks.values()), None))
        lasts = np.arange(micro_batches - 1, self._micro_batches, micro_batches)
        slots = np.zeros_like(lasts) if block is None else block.slots_of(lasts)
        self._add(Phase.UPDATE, slots, Kind.UPDATE, stage, Portion(lasts))

    def _add(
        self,
        phase: Phase,
        slots: Column,
        kind: Kind,
        stage: int,
        portion: Portion = _ONCE,
        *,
        channel: int = -1,
        within: Column = 0,
    ) -> None:
        """A row at each of some slots, of one kind, stage and channel.

        Args:
            within: the order of rows of one slot and phase.
        """
        index, start, stop = portion
        values = (kind, stage, index, channel, start, stop, 0)
        self._rows.append((np.atleast_1d(slots), phase, within, values))

    def _add_receives(
        self, index: int, channel: Channel, portion: Portion, *, offload: bool
    ) -> None:
        stage, saved = channel.target_stage, channel.kind is TransferKind.SAVED
        reader = self._backward(stage) if saved else self._user(channel, stage)
        slots = reader.slots_of(portion.micro_batches)
        if saved:
            posted = self._arrivals(stage, portion)
        else:
            made = self._made(channel, portion)
            rising = made.argsort()
            slots, portion = slots[rising], portion.some(rising)
            posted = _posted(slots, made[rising], RECEIVE_AHEAD, 0)
        wait = Phase.RECEIVE_SAVED if saved else Phase.RECEIVE_WAIT
        start, number = Phase.RECEIVE_START, _WITHIN * offload * portion.micro_batches
        self._add(start, posted, Kind.RECEIVE_START, stage, portion, channel=index, within=number)
        if offload:
            early = _early(posted)
            away = _away(posted, slots, early)
            for phase, some in ((start, away & early), (Phase.RECEIVE_OFFLOADED, away & ~early)):
                chosen = np.flatnonzero(some)
                self._add(
                    phase, posted[chosen], Kind.RECEIVE_WAIT, stage, portion.some(chosen),
                    channel=index, within=number[chosen] + _WITHIN + 1,
                )  # fmt: skip
            slots, portion = slots[~away], portion.some(np.flatnonzero(~away))
        self._add(wait, slots, Kind.RECEIVE_WAIT, stage, portion, channel=index)

    def _add_sends(self, index: int, channel: Channel, portion: Portion, kept: bool) -> None:
        """Sends are awaited before a backward releases what they hold, else a few messages later,
        after their receives have started."""
        stage = channel.source_stage
        slots = self._user(channel, stage).slots_of(portion.micro_batches)
        self._add(Phase.SEND_START, slots, Kind.SEND_START, stage, portion, channel=index)
        if kept:
            phase, late = Phase.RELEASE, self._backward(stage).slots_of(portion.micro_batches)
        else:
            saved = channel.kind is TransferKind.SAVED
            on_the_way = SAVED_ON_THE_WAY if saved else SENDS_ON_THE_WAY
            made = self._made(channel, portion)
            posted = made  # turns by which the other end has started to receive
            if not saved:
                indices = portion.micro_batches
                read = self._order.turns(_maker(channel), channel.target_stage, indices)
                posted = _posted(read, made, RECEIVE_AHEAD, -1)
            safe = np.searchsorted(self._turns, posted, "right")
            phase = Phase.SEND_WAIT
            late = np.maximum(-_behind(-slots, on_the_way, -self._end), safe)
        self._add(phase, late, Kind.SEND_WAIT, stage, portion, channel=index)

    def _add_offload(
        self, stage: int, begun: Integers, backward: Block, early: npt.NDArray[np.bool_]
    ) -> None:
        """The rows that offload and fetch what one stage saves.

        Both copies run beside one computation each; steady 1F1B, ``o`` and ``f`` the copies of one
        micro-batch::

            compute   F0  F1  F2  B?  F3  B?  F4  B0
            copies        o0                  f0

        The device holds about two micro-batches of the stage, whatever the warm-up. If the forward
        has another rank, what it sends leaves after the computation beside which it arrives, or at
        once if the rank waits for what it computes next.

        Args:
            begun: slots of the forwards, or beside which what they saved arrives.
            early: whether it arrives before the computation of that slot.
        """
        away = _away(begun, backward.slots, early)
        chosen = np.flatnonzero(away)
        portion, number = backward.portion.some(chosen), _WITHIN * backward.portion.micro_batches
        for some, first, last in (
            (away & early, (Phase.RECEIVE_START, 0), (Phase.RECEIVE_START, 0)),
            (away & ~early, (Phase.OFFLOAD_START, 0), (Phase.OFFLOAD_WAIT, COPIED_BESIDE)),
        ):
            index = np.flatnonzero(some)
            leaving, slots, within = backward.portion.some(index), begun[index], number[index]
            self._add(
                first[0], slots + first[1], Kind.OFFLOAD_START, stage, leaving,
                within=within + _WITHIN + 2,
            )  # fmt: skip
            self._add(
                last[0], slots + last[1], Kind.OFFLOAD_WAIT, stage, leaving,
                within=within + 2 * _WITHIN + 3,
            )  # fmt: skip
        back = backward.slots[chosen]
        self._add(Phase.FETCH_START, back - COPIED_BESIDE, Kind.FETCH_START, stage, portion)
        self._add(Phase.FETCH_WAIT, back, Kind.FETCH_WAIT, stage, portion)

    def _arrivals(self, stage: int, portion: Portion) -> Integers:
        """Slots beside whose computation the saved values of a forward elsewhere arrive."""
        turns = self._order.turns(Kind.FORWARD, stage, portion.micro_batches)
        slots: Integers = np.searchsorted(self._turns, turns)
        return slots

    def _made(self, channel: Channel, portion: Portion) -> Integers:
        """Turns at which the messages of a channel are made, and sent."""
        return self._order.turns(_maker(channel), channel.source_stage, portion.micro_batches)

    def _backward(self, stage: int) -> Block:
        """The actions of a stage here with which its backwards begin."""
        return self._blocks[self._order.first_half, stage]

    def _user(self, channel: Channel, stage: int) -> Block:
        """The actions of a stage here that make or read the messages of a channel."""
        if channel.kind is TransferKind.GRADIENT:
            return self._backward(stage)
        forward = self._blocks.get((Kind.FORWARD, stage))
        return forward if forward is not None else self._blocks[Kind.EVALUATE, stage]


def _maker(channel: Channel) -> Kind:
    """What makes the messages of a channel; what reads those between stages has its turn, too."""
    return Kind.BACKWARD if channel.kind is TransferKind.GRADIENT else Kind.FORWARD


def _behind(values: Integers, count: int, first: int) -> Integers:
    """Of every value the one that is ``count`` places below it, ``first`` for the lowest ones."""
    rising = values.argsort()
    behind = np.empty_like(values)
    behind[rising] = np.concatenate([np.full(count, first), values[rising]])[: len(values)]
    return behind


def _posted(read: Integers, made: Integers, count: int, first: int) -> Integers:
    """When receives start: in the order of the sends, ``count`` messages before each is read.

    Where messages are read in another order than they are sent, the earliest of all later ones
    counts, so that receives start in the order of the sends and in time.

    Args:
        read, made: when each message is read, and made.
    """
    rising = made.argsort()
    needed = np.minimum.accumulate(read[rising][::-1])[::-1]
    posted = np.empty_like(read)
    posted[rising] = np.concatenate([np.full(count, first), needed])[: len(read)]
    return posted


def _early(arrivals: Integers) -> npt.NDArray[np.bool_]:
    """Whether saved values arrive while their rank waits for what it computes next: the forward
    after theirs is there before that, too."""
    return np.append(arrivals[1:] == arrivals[:-1], False)


def _away(begun: Integers, back: Integers, early: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether something runs while each micro-batch is away; else nothing would be gained."""
    away: npt.NDArray[np.bool_] = begun + COPIED_BESIDE * ~early + 1 < back - COPIED_BESIDE
    return away
