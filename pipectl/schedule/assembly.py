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

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from pipectl.graph import TransferKind
from pipectl.schedule.actions import Action, Actions, Integers, Kind
from pipectl.schedule.channel import Channel
from pipectl.schedule.computing import Block, Computation
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


class Rows:
    """Rows in any order; :meth:`sorted` puts them by slot and phase."""

    def __init__(self) -> None:
        self._parts: list[tuple[Integers, int, Column, tuple[Column, ...]]] = []

    def add(
        self,
        phase: Phase,
        slots: Integers,
        kind: Kind,
        stage: int,
        portion: Portion,
        *,
        channel: int = -1,
        within: Column = 0,
    ) -> None:
        """A row at each of some slots, of one kind, stage and channel.

        Args:
            within: the order of rows of one slot and phase.
        """
        index, start, stop = portion
        self._parts.append((slots, phase, within, (kind, stage, index, channel, start, stop, 0)))

    def add_one(
        self, phase: Phase, slot: int, kind: Kind, stage: int, *, channel: int = -1
    ) -> None:
        """A row that belongs to no micro-batch."""
        values = (kind, stage, -1, channel, -1, -1, 0)
        self._parts.append((np.array([slot]), phase, 0, values))

    def sorted(self) -> Actions:
        """All rows; those of one slot and phase as they were added."""
        total = sum(len(slots) for slots, *_ in self._parts)
        rows = np.empty((total, len(Action._fields)), dtype=np.int32)
        places, order = np.empty((2, total), dtype=np.int64)
        first = 0
        for slots, phase, within, values in self._parts:
            part = slice(first, first := first + len(slots))
            places[part], order[part] = slots * len(Phase) + phase, within
            for position, value in enumerate(values):
                rows[part, position] = value
        return Actions(rows[np.lexsort((order, places))])


class Assembly:
    """Puts the rows of one program together."""

    def __init__(self, computation: Computation, rank: int) -> None:
        self.rows = Rows()
        self._computation = computation
        self._rank = rank
        for (kind, stage), block in computation.blocks.items():
            self.rows.add(Phase.COMPUTE, block.slots, kind, stage, block.portion)

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

    def add_weights(self, index: int, channel: Channel) -> None:
        """The message with which a step begins: weights, from where they were updated."""
        end = len(self._computation)
        if channel.source_rank == self._rank:
            stage = channel.source_stage
            self._add_weight(Phase.RECEIVE_START, 0, Kind.SEND_START, stage, index)
            self._add_weight(Phase.SEND_WAIT, end, Kind.SEND_WAIT, stage, index)
            return
        stage = channel.target_stage
        slots = self._computation.blocks[Kind.FORWARD, stage].slots
        first = int(slots[0]) if len(slots) else end
        self._add_weight(Phase.RECEIVE_START, 0, Kind.RECEIVE_START, stage, index)
        self._add_weight(Phase.RECEIVE_WAIT, first, Kind.RECEIVE_WAIT, stage, index)

    def add_renewals(
        self, index: int, channel: Channel, uses: Integers, micro_batches: int
    ) -> None:
        """The messages of weights of a stretch of steps.

        Each belongs to the last micro-batch of the update that made its version; the first, with
        what the stretch begins with, to none (-1).

        Args:
            uses: the first micro-batch to use each of them.
            micro_batches: of a step.
        """
        made = np.arange(len(uses)) * micro_batches - 1
        portion = Portion(made)
        if channel.source_rank == self._rank:
            stage = channel.source_stage
            back = self._computation.blocks[Kind.BACKWARD, stage]
            self._add_weight(Phase.RECEIVE_START, 0, Kind.SEND_START, stage, index)
            later, slots = Portion(made[1:]), back.slots_of(made[1:])
            self.rows.add(Phase.RENEW, slots, Kind.SEND_START, stage, later, channel=index)
            slots = back.slots_of(made + micro_batches)
            self.rows.add(Phase.SEND_WAIT, slots, Kind.SEND_WAIT, stage, portion, channel=index)
            return
        stage = channel.target_stage
        slots = self._computation.blocks[Kind.FORWARD, stage].slots_of(uses)
        self._add_weight(Phase.RECEIVE_START, 0, Kind.RECEIVE_START, stage, index)
        start, later = Phase.RECEIVE_NEXT, Portion(made[1:])
        self.rows.add(start, slots[:-1], Kind.RECEIVE_START, stage, later, channel=index)
        wait = Phase.RECEIVE_WAIT
        self.rows.add(wait, slots, Kind.RECEIVE_WAIT, stage, portion, channel=index)

    def add_stage(
        self, stage: int, *, elsewhere: bool, recompute: bool, offload: bool, reduce: bool
    ) -> None:
        """What the backward of a stage on this rank needs, and the sum of its gradients.

        Args:
            elsewhere: whether its forwards have another rank.
        """
        back, last_half = self._backward(stage), self._computation.order.last_half
        end = len(self._computation)
        if recompute:
            self.rows.add(Phase.RECOMPUTE, back.slots, Kind.RECOMPUTE, stage, back.portion)
        if offload:
            if elsewhere:
                arrivals = self._arrivals(stage, back.portion)
                _add_offload(self.rows, stage, arrivals, back, early=_early(arrivals))
            else:
                begun = self._computation.blocks[Kind.FORWARD, stage].slots
                _add_offload(self.rows, stage, begun, back, early=np.zeros(len(begun), dtype=bool))
        if reduce:
            slots = self._computation.blocks[last_half, stage].slots
            last = int(slots.max(initial=-1)) if len(slots) else end
            self.rows.add_one(Phase.REDUCE_START, last, Kind.REDUCE_START, stage)
            self.rows.add_one(Phase.REDUCE_WAIT, end, Kind.REDUCE_WAIT, stage)

    def add_updates(self, stage: int, micro_batches: int) -> None:
        """One after the last backward of every step of so many micro-batches.

        Args:
            stage: -1 for a rank that updates none: after the last forward, if it has any.
        """
        blocks = self._computation.blocks
        block = blocks.get((Kind.BACKWARD, stage), next(iter(blocks.values()), None))
        lasts = np.arange(micro_batches - 1, self._computation.micro_batches, micro_batches)
        slots = np.zeros_like(lasts) if block is None else block.slots_of(lasts)
        self.rows.add(Phase.UPDATE, slots, Kind.UPDATE, stage, Portion(lasts))

    def _add_weight(self, phase: Phase, slot: int, kind: Kind, stage: int, index: int) -> None:
        self.rows.add_one(phase, slot, kind, stage, channel=index)

    def _arrivals(self, stage: int, portion: Portion) -> Integers:
        """Slots beside whose computation the saved values of a forward elsewhere arrive."""
        turns = self._turns(Kind.FORWARD, stage, portion)
        slots: Integers = np.searchsorted(self._computation.turns, turns)
        return slots

    def _add_receives(
        self, index: int, channel: Channel, portion: Portion, *, offload: bool = False
    ) -> None:
        stage, saved = channel.target_stage, channel.kind is TransferKind.SAVED
        slots = self._user(channel, channel.target_stage, target=True).slots_of(
            portion.micro_batches
        )
        if saved:
            early = self._arrivals(stage, portion)
        else:
            made = self._made(channel, portion)
            rising = made.argsort()
            slots, portion = slots[rising], portion.some(rising)
            early = _posted(slots, made[rising], RECEIVE_AHEAD, 0)
        wait = Phase.RECEIVE_SAVED if saved else Phase.RECEIVE_WAIT
        start, number = Phase.RECEIVE_START, _WITHIN * offload * portion.micro_batches
        self.rows.add(
            start, early, Kind.RECEIVE_START, stage, portion, channel=index, within=number
        )
        if offload:
            before = _early(early)
            away = _away(early, slots, before)
            for phase, some in ((start, away & before), (Phase.RECEIVE_OFFLOADED, away & ~before)):
                chosen = np.flatnonzero(some)
                self.rows.add(
                    phase, early[chosen], Kind.RECEIVE_WAIT, stage, portion.some(chosen),
                    channel=index, within=number[chosen] + _WITHIN + 1,
                )  # fmt: skip
            slots, portion = slots[~away], portion.some(np.flatnonzero(~away))
        self.rows.add(wait, slots, Kind.RECEIVE_WAIT, stage, portion, channel=index)

    def _add_sends(self, index: int, channel: Channel, portion: Portion, kept: bool) -> None:
        stage = channel.source_stage
        slots = self._user(channel, stage).slots_of(portion.micro_batches)
        self.rows.add(Phase.SEND_START, slots, Kind.SEND_START, stage, portion, channel=index)
        if kept:
            back = self._backward(stage)
            phase, late = Phase.RELEASE, back.slots_of(portion.micro_batches)
        else:
            phase, late = Phase.SEND_WAIT, self._late(channel, portion, slots)
        self.rows.add(phase, late, Kind.SEND_WAIT, stage, portion, channel=index)

    def _late(self, channel: Channel, portion: Portion, slots: Integers) -> Integers:
        """Slots after which sends are awaited: few messages later, after their receives."""
        saved = channel.kind is TransferKind.SAVED
        most = SAVED_ON_THE_WAY if saved else SENDS_ON_THE_WAY
        late = -_behind(-slots, most, -len(self._computation))
        safe = np.searchsorted(self._computation.turns, self._posted(channel, portion), "right")
        latest: Integers = np.maximum(late, safe)
        return latest

    def _posted(self, channel: Channel, portion: Portion) -> Integers:
        """Turns by which the other end has started to receive."""
        if channel.kind is TransferKind.SAVED:
            return self._turns(Kind.FORWARD, channel.target_stage, portion)
        kind = Kind.BACKWARD if channel.kind is TransferKind.GRADIENT else Kind.FORWARD
        read = self._turns(kind, channel.target_stage, portion)
        return _posted(read, self._made(channel, portion), RECEIVE_AHEAD, -1)

    def _made(self, channel: Channel, portion: Portion) -> Integers:
        """Turns at which the messages of a channel are made, and sent."""
        kind = Kind.BACKWARD if channel.kind is TransferKind.GRADIENT else Kind.FORWARD
        return self._turns(kind, channel.source_stage, portion)

    def _backward(self, stage: int) -> Block:
        """The actions of a stage here with which its backwards begin."""
        return self._computation.blocks[self._computation.order.first_half, stage]

    def _turns(self, kind: Kind, stage: int, portion: Portion) -> Integers:
        return self._computation.order.turns(kind, stage, portion.micro_batches)

    def _user(self, channel: Channel, stage: int, *, target: bool = False) -> Block:
        """The actions of a stage here that make or read the messages of a channel."""
        blocks = self._computation.blocks
        backward = channel.kind is TransferKind.GRADIENT
        if backward or (target and channel.kind is TransferKind.SAVED):
            return self._backward(stage)
        forward = blocks.get((Kind.FORWARD, stage))
        return forward if forward is not None else blocks[Kind.EVALUATE, stage]


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


def _add_offload(
    rows: Rows, stage: int, begun: Integers, backward: Block, early: npt.NDArray[np.bool_]
) -> None:
    """The rows that offload and fetch what one stage saves on one rank.

    Both copies run beside one computation each; steady 1F1B, ``o`` and ``f`` the copies of one
    micro-batch::

        compute   F0  F1  F2  B?  F3  B?  F4  B0
        copies        o0                  f0

    The device holds about two micro-batches of the stage, whatever the warm-up. If the forward has
    another rank, what it sends leaves after the computation beside which it arrives, or at once if
    the rank waits for what it computes next.

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
        rows.add(
            first[0], slots + first[1], Kind.OFFLOAD_START, stage, leaving,
            within=within + _WITHIN + 2,
        )  # fmt: skip
        rows.add(
            last[0], slots + last[1], Kind.OFFLOAD_WAIT, stage, leaving,
            within=within + 2 * _WITHIN + 3,
        )  # fmt: skip
    back = backward.slots[chosen]
    rows.add(Phase.FETCH_START, back - COPIED_BESIDE, Kind.FETCH_START, stage, portion)
    rows.add(Phase.FETCH_WAIT, back, Kind.FETCH_WAIT, stage, portion)
