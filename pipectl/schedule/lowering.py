"""Lowering: from the computations of a rank to its program, with messages and memory operations.

The schedule provides the computations. The rows around each computation are, in this order::

    RECEIVE_START   of a message that is consumed ``RECEIVE_AHEAD`` messages later
    FETCH_START     of what the next computation needs
    RECEIVE_WAIT    for saved values, FETCH_WAIT, RECOMPUTE: what a backward starts from
    RECEIVE_WAIT    for the other inputs of the computation
    RECEIVE_START   of the weights after those that have just arrived
    SEND_WAIT       for the activations whose memory a backward is about to release
    the computation
    SEND_WAIT       for an earlier message of the same channel, usually two before
    OFFLOAD_WAIT    for what the previous computation saved
    SEND_START      of the outputs of the computation
    RECEIVE_WAIT    for saved values that are offloaded until their backward
    OFFLOAD_START   of what the computation saved, or of these values
    REDUCE_START    after the last backward of a stage with several replicas

A receive is posted before its message can arrive, a send starts at once, and a wait comes as late
as the memory of its buffer allows: an activation is sent from the values that its backward needs
anyway, and only a few other messages per channel are in flight. All operations end before UPDATE.
If a schedule splits backwards, their input halves receive, recompute, release and send; gradients
are summed after the last weight half.

Waits cannot form a cycle: all ranks compute in one order (see ``order``), in which a receive starts
no later than the computation before which it is posted. A send is awaited after a later turn, and
by then, in that order, its receive has started. Reductions are awaited only at the end.

If steps are not flushed, several steps are lowered as one, with an UPDATE after the last backward
of each. After a few steps all steps are the same, so a long stretch repeats the rows of one.

If the forward and the backward of a stage run on different ranks, the second rank starts to receive
saved values by the turn of the forward that computes them, so that the first can release them soon.
A step begins with the return of the last step's weights. If steps are not flushed, weights are sent
after their UPDATE, into buffers that are posted before the first forward with the previous weights;
a rank that only runs forwards has an UPDATE after the last forward of each step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl import __version__
from pipectl.lanes import TransferKind
from pipectl.plan import Plan
from pipectl.schedule import unflushed
from pipectl.schedule.actions import Action, Actions, Integers, Kind
from pipectl.schedule.channel import (
    Channel,
    Column,
    Portion,
    channels,
    channels_of_rank,
    common,
    is_apart,
    is_kept,
    messages_in_turn,
    numbers_in_turn,
    roles,
)
from pipectl.schedule.order import Order
from pipectl.schedule.registry import is_unflushed, order_of
from pipectl.schedule.unflushed import first_uses, with_versions

RECEIVE_AHEAD = 1
"""Receives posted per channel in addition to that of the next message (double buffering): one
message can arrive while the previous one is used."""
SENDS_ON_THE_WAY = 2
"""Minimum number of sends in flight per channel: one moves while the next is computed."""
SAVED_ON_THE_WAY = 1
"""As ``SENDS_ON_THE_WAY`` for saved values, which are large: they move during the next forward."""
COPIED_BESIDE = 1
"""Number of computations during which a copy to or from the host runs."""
_WITHIN = 4
"""Rows per micro-batch of saved values that arrive and leave while a rank waits to compute."""
_ONCE = Portion(np.array([-1]))
"""Portion of a row that belongs to no micro-batch."""


def lower(plan: Plan, rank: int, micro_batches: int | None = None) -> Actions:
    """Return the program of one rank, in time proportional to the number of its actions.

    Every rank has exactly one UPDATE per step, the last row, with the first stage that it updates
    or -1: idle ranks take part in the collective operations at the end of a step. If steps are not
    flushed, the program is the shortest stretch with a steady step.

    Args:
        micro_batches: number in this step; by default the plan's, the only one without flushes.

    Raises:
        ScheduleError: the schedule is unknown, or the stages do not suit it.
    """
    if is_unflushed(plan):
        return lower_stretch(plan, rank, 1 + unflushed.steps_apart(plan))
    return _rows(plan, rank, micro_batches or plan.micro_batches)


def lower_stretch(plan: Plan, rank: int, steps: int) -> Actions:
    """Return the program of a rank for steps without flushes, between two empty pipelines.

    Raises:
        ScheduleError: see :func:`lower`.
    """
    return with_versions(plan, _rows(plan, rank, steps * plan.micro_batches))


def stretch(plan: Plan, rank: int, steps: int) -> Iterator[tuple[Actions, int]]:
    """Yield :func:`lower_stretch` in parts, each with the offset of its micro-batches.

    The steady steps of a long stretch share their rows.

    Raises:
        ScheduleError: see :func:`lower`.
    """
    alike = steps - unflushed.steps_apart(plan)
    if alike <= 1:
        yield lower_stretch(plan, rank, steps), 0
        return
    rows = lower(plan, rank)
    updates = np.flatnonzero(rows.column("kind") == Kind.UPDATE)
    first, last = 1 + updates[unflushed.steady_from(plan) - 1 :][:2]
    begin, steady, end = map(Actions, np.split(rows.rows, [first, last]))
    yield begin, 0
    yield from ((steady, number * plan.micro_batches) for number in range(alike))
    yield end, (alike - 1) * plan.micro_batches


def _rows(plan: Plan, rank: int, micro_batches: int) -> Actions:
    """Return the rows of a step, or of several steps that are not flushed."""
    order, held = order_of(plan, micro_batches), roles(plan, rank)
    parts = [
        (kind, role.stage, common(plan, role[1:], role[1:], micro_batches))
        for role in held
        for kind in order.parts(role.kind)
    ]
    assembly = Assembly(rank, parts, order, micro_batches)
    overlaps = is_unflushed(plan)
    for index, channel in channels_of_rank(plan, rank):
        if channel.kind is TransferKind.WEIGHT:
            uses = first_uses(plan, channel.target_stage, micro_batches) if overlaps else None
            assembly.add_weights(index, channel, uses, plan.micro_batches)
        elif not channel.is_local:
            saved = channel.kind is TransferKind.SAVED
            assembly.add_messages(
                index,
                channel,
                messages_in_turn(plan, channel, micro_batches),
                kept=is_kept(plan, channel),
                offload=saved and plan.stages[channel.target_stage].offload,
            )
    updated = [role for role in held if role.kind is Kind.BACKWARD]
    for role in updated:
        stage = plan.stages[role.stage]
        assembly.add_stage(
            role.stage,
            elsewhere=is_apart(plan, role.stage, role.replica),
            recompute=stage.recompute,
            offload=stage.offload,
            reduce=stage.replicas > 1,
        )
    first = min((role.stage for role in updated), default=-1)
    assembly.add_updates(first, plan.micro_batches if overlaps else None)
    rows = assembly.sorted()
    return rows.renumbered(numbers_in_turn(plan, micro_batches)) if plan.reproducible else rows


def lower_evaluation(
    forward_channels: Sequence[Channel], stages: Sequence[int], rank: int, micro_batches: int
) -> Actions:
    """Return the forward-only program of one rank, without UPDATE.

    One micro-batch follows another; four stages, four micro-batches::

        stage 0  0123
        stage 1  .0123
        stage 2  ..0123
        stage 3  ...0123

    Args:
        forward_channels: those of the evaluation graph; the program holds their indices.
        stages: stages of this rank.
    """
    ends = [stage for item in forward_channels for stage in (item.source_stage, item.target_stage)]
    width, every = 1 + max([0, *stages, *ends]), Portion(np.arange(micro_batches))

    def turns(stage: int, micro_batch: Integers) -> Integers:
        return micro_batch * width + stage

    parts = [(Kind.EVALUATE, stage, every) for stage in stages]
    assembly = Assembly(rank, parts, Order(turns, turns), micro_batches)
    for index, channel in enumerate(forward_channels):
        if not channel.is_local:
            assembly.add_messages(index, channel, every, kept=False)
    return assembly.sorted()


def program_hash(plan: Plan) -> str:
    """Return the hash of all that ranks do by a plan; ranks compare it when they start."""
    content = [
        __version__,
        plan.schedule,
        plan.warm_up,
        plan.actions,
        [plan.batch_size, plan.micro_batch_size, plan.micro_batches],
        [plan.replication, plan.shard_optimizer, plan.reproducible],
        [[s.nodes, s.ranks, s.backward_ranks, s.recompute, s.offload] for s in plan.stages],
        [s.segments and s.segments.firsts for s in plan.stages],
        plan.offload_to,
        [astuple(channel) for channel in channels(plan)],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def lower_renewal(plan: Plan, rank: int) -> Actions:
    """Return the rows that bring updated weights to forwards on other ranks than their backwards.

    All messages are started before any is awaited, so ranks cannot wait for each other.
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
    return Actions.of([*starts, *waits])


class Phase(IntEnum):
    """Order of the rows around the computation of a slot."""

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
    """The actions of one kind and stage by ascending micro-batch, and the slot of each."""

    portion: Portion
    slots: Integers

    def slots_of(self, micro_batches: Integers) -> Integers:
        """Return the slots of some of its micro-batches."""
        if len(micro_batches) == len(self.slots):
            return self.slots
        slots: Integers = self.slots[np.searchsorted(self.portion.micro_batches, micro_batches)]
        return slots


class Assembly:
    """Assembles the rows of one program. A *slot* is the position of a computation of the rank.

    Args:
        parts: computations of the rank, by kind and stage.
        micro_batches: number in the step, or in all steps that are lowered together.
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
        """Return all rows by slot and phase; rows of the same slot and phase keep their order."""
        total = sum(len(slots) for slots, *_ in self._rows)
        rows = np.empty((total, len(Action._fields)), dtype=np.int32)
        places, order = np.empty((2, total), dtype=np.int64)
        first = 0
        for slots, phase, within, values in self._rows:
            part = slice(first, first := first + len(slots))
            places[part], order[part] = slots * len(Phase) + phase, within
            for position, value in enumerate(values):
                rows[part, position] = value
        places *= 1 + int(order.max(initial=0))
        return Actions(rows[np.argsort(places + order, kind="stable")])

    def add_messages(
        self, index: int, channel: Channel, portion: Portion, *, kept: bool, offload: bool = False
    ) -> None:
        """Add the messages of a channel between this rank and another one.

        Args:
            portion: content of the messages.
            kept: whether the sender keeps the content until its backward anyway.
            offload: whether the receiver offloads the content until its backward.
        """
        if channel.source_rank == self._rank:
            self._add_sends(index, channel, portion, kept)
        if channel.target_rank == self._rank:
            self._add_receives(index, channel, portion, offload=offload)

    def add_weights(
        self, index: int, channel: Channel, uses: Integers | None, micro_batches: int
    ) -> None:
        """Add the messages of weights, from the rank that updates them.

        A step begins with one message. In a stretch of steps, each message belongs to the last
        micro-batch of the update that made its version; the first one, with the initial weights, to
        none (-1).

        Args:
            uses: first micro-batch that uses each version; None for a single step.
            micro_batches: number per step.
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
        """Add what the backward of a stage on this rank needs, and the sum of its gradients.

        Args:
            elsewhere: whether its forwards run on another rank.
        """
        back = self._backward_block(stage)
        if recompute:
            self._add(Phase.RECOMPUTE, back.slots, Kind.RECOMPUTE, stage, back.portion)
        if offload and elsewhere:
            arrivals = self._arrivals(stage, back.portion)
            self._add_offload(stage, arrivals, back, early=_is_early(arrivals))
        elif offload:
            begun = self._blocks[Kind.FORWARD, stage].slots
            self._add_offload(stage, begun, back, early=np.zeros(len(begun), dtype=bool))
        if reduce:
            slots = self._blocks[self._order.last_half, stage].slots
            last = int(slots.max()) if len(slots) else self._end
            self._add(Phase.REDUCE_START, last, Kind.REDUCE_START, stage)
            self._add(Phase.REDUCE_WAIT, self._end, Kind.REDUCE_WAIT, stage)

    def add_updates(self, stage: int, micro_batches: int | None) -> None:
        """Add UPDATE at the end of the step, or after the last backward of each step of a stretch.

        Args:
            stage: -1 for a rank that updates no stage: UPDATE follows its last forward, if any.
            micro_batches: number per step of a stretch; None for a single step.
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
        """Add rows of one kind, stage and channel at some slots.

        Args:
            within: order of the rows of one slot and phase.
        """
        index, start, stop = portion
        values = (kind, stage, index, channel, start, stop, 0)
        self._rows.append((np.atleast_1d(slots), phase, within, values))

    def _add_receives(
        self, index: int, channel: Channel, portion: Portion, *, offload: bool
    ) -> None:
        stage, saved = channel.target_stage, channel.kind is TransferKind.SAVED
        reader = self._backward_block(stage) if saved else self._end_block(channel, stage)
        slots = reader.slots_of(portion.micro_batches)
        if saved:
            posts = self._arrivals(stage, portion)
        else:
            sends = self._send_turns(channel, portion)
            rising = sends.argsort()
            slots, portion = slots[rising], portion.some(rising)
            posts = _receive_turns(slots, sends[rising], RECEIVE_AHEAD, 0)
        wait = Phase.RECEIVE_SAVED if saved else Phase.RECEIVE_WAIT
        start, number = Phase.RECEIVE_START, _WITHIN * offload * portion.micro_batches
        self._add(start, posts, Kind.RECEIVE_START, stage, portion, channel=index, within=number)
        if offload:
            early = _is_early(posts)
            away = _is_away(posts, slots, early)
            for phase, some in ((start, away & early), (Phase.RECEIVE_OFFLOADED, away & ~early)):
                chosen = np.flatnonzero(some)
                self._add(
                    phase, posts[chosen], Kind.RECEIVE_WAIT, stage, portion.some(chosen),
                    channel=index, within=number[chosen] + _WITHIN + 1,
                )  # fmt: skip
            slots, portion = slots[~away], portion.some(np.flatnonzero(~away))
        self._add(wait, slots, Kind.RECEIVE_WAIT, stage, portion, channel=index)

    def _add_sends(self, index: int, channel: Channel, portion: Portion, kept: bool) -> None:
        """Add sends and their waits: before a backward releases the content if it is kept, else a
        few messages later, after their receives have started."""
        stage = channel.source_stage
        slots = self._end_block(channel, stage).slots_of(portion.micro_batches)
        self._add(Phase.SEND_START, slots, Kind.SEND_START, stage, portion, channel=index)
        if kept:
            phase, late = Phase.RELEASE, self._backward_block(stage).slots_of(portion.micro_batches)
        else:
            saved = channel.kind is TransferKind.SAVED
            on_the_way = SAVED_ON_THE_WAY if saved else SENDS_ON_THE_WAY
            sends = self._send_turns(channel, portion)
            posts = sends  # turns by which the other end has started to receive
            if not saved:
                indices = portion.micro_batches
                reads = self._order.turns(_end_kind(channel), channel.target_stage, indices)
                posts = _receive_turns(reads, sends, RECEIVE_AHEAD, -1)
            safe = np.searchsorted(self._turns, posts, "right")
            phase = Phase.SEND_WAIT
            late = np.maximum(-_lower_neighbours(-slots, on_the_way, -self._end), safe)
        self._add(phase, late, Kind.SEND_WAIT, stage, portion, channel=index)

    def _add_offload(
        self, stage: int, begun: Integers, backward: Block, early: npt.NDArray[np.bool_]
    ) -> None:
        """Add the rows that offload and fetch what one stage saves.

        Each copy runs during one computation; in steady 1F1B, with the copies ``o`` and ``f`` of
        micro-batch 0::

            compute   F0  F1  F2  B?  F3  B?  F4  B0
            copies        o0                  f0

        The device holds about two micro-batches of the stage, whatever the warm-up. If the forward
        runs on another rank, its saved values are offloaded after the computation during which they
        arrive, or at once if the rank is waiting for its next computation.

        Args:
            begun: slots of the forwards, or of the computations during which saved values arrive.
            early: whether saved values arrive before the computation of that slot.
        """
        away = _is_away(begun, backward.slots, early)
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
        """Return the slots during which saved values of forwards on other ranks arrive."""
        turns = self._order.turns(Kind.FORWARD, stage, portion.micro_batches)
        slots: Integers = np.searchsorted(self._turns, turns)
        return slots

    def _send_turns(self, channel: Channel, portion: Portion) -> Integers:
        return self._order.turns(_end_kind(channel), channel.source_stage, portion.micro_batches)

    def _backward_block(self, stage: int) -> Block:
        """Return the actions that begin the backwards of a stage."""
        return self._blocks[self._order.first_half, stage]

    def _end_block(self, channel: Channel, stage: int) -> Block:
        """Return the actions of a stage that compute or read the messages of a channel."""
        if channel.kind is TransferKind.GRADIENT:
            return self._backward_block(stage)
        forward = self._blocks.get((Kind.FORWARD, stage))
        return forward if forward is not None else self._blocks[Kind.EVALUATE, stage]


def _end_kind(channel: Channel) -> Kind:
    """Return the kind of action that computes and, at the other end, reads the messages."""
    return Kind.BACKWARD if channel.kind is TransferKind.GRADIENT else Kind.FORWARD


def _lower_neighbours(values: Integers, count: int, first: int) -> Integers:
    """Return for each value the one ``count`` places below it; ``first`` for the lowest ones."""
    rising = values.argsort()
    lower = np.empty_like(values)
    lower[rising] = np.concatenate([np.full(count, first), values[rising]])[: len(values)]
    return lower


def _receive_turns(reads: Integers, sends: Integers, count: int, first: int) -> Integers:
    """Return when receives start: in the order of sends, ``count`` messages before each is read.

    If messages are read in another order than sent, the earliest read of all later ones counts.

    Args:
        reads, sends: when each message is read and sent.
    """
    rising = sends.argsort()
    needed = np.minimum.accumulate(reads[rising][::-1])[::-1]
    posts = np.empty_like(reads)
    posts[rising] = np.concatenate([np.full(count, first), needed])[: len(reads)]
    return posts


def _is_early(arrivals: Integers) -> npt.NDArray[np.bool_]:
    """Return whether saved values arrive in the same slot as those of the next forward."""
    return np.append(arrivals[1:] == arrivals[:-1], False)


def _is_away(
    begun: Integers, back: Integers, early: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return whether any computation runs while each micro-batch is offloaded."""
    away: npt.NDArray[np.bool_] = begun + COPIED_BESIDE * ~early + 1 < back - COPIED_BESIDE
    return away
