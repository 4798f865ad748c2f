"""A step of one rank: its rows, the channels they refer to, and what it reads of the data.

All of it follows from the plan and the number of samples, and is made once for each such number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture import Lane
from pipectl.capture.data import micro_batches_of
from pipectl.capture.randomness import seed_of
from pipectl.capture.slices import Rows
from pipectl.graph import TransferKind
from pipectl.plan import Plan, Replication
from pipectl.runtime.tracing import Recording
from pipectl.schedule import Actions, Channel, Kind, Portion, channels, lower, portion, roles
from pipectl.schedule import messages as messages_of

Batch = tuple[Any, Any]


class LocalLane(NamedTuple):
    """A channel whose ends share this rank.

    Args:
        carried: what of every micro-batch; None for all of each.
    """

    channel: int
    lane: Lane
    carried: Mapping[int, Rows] | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """What a rank does with so many samples.

    Args:
        actions: of one step; empty if steps overlap and come in parts.
        channels: what the channel column refers to.
        sizes: every micro-batch as a whole.
        plan: of this step; None if it is not a step of training.
        pieces: what is loaded at once: some rows of each micro-batch that is needed, by rising
            micro-batch; None for every micro-batch as a whole.
        local: channels that stay on this rank, by kind and source stage.
        heads: by channel and micro-batch, where the part of the replica at its end begins; empty
            if micro-batches are not split.
        closing: of every stage whose gradients are summed, its last backward's micro-batch.
    """

    actions: Actions
    channels: Sequence[Channel]
    sizes: Sequence[Rows]
    plan: Plan | None = None
    pieces: Mapping[int, Rows] | None = None
    local: Mapping[tuple[TransferKind, int], Sequence[LocalLane]] = field(default_factory=dict)
    heads: Mapping[tuple[int, int], int] = field(default_factory=dict)
    closing: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        plan: Plan,
        rank: int,
        reading: Sequence[int],
        *,
        length: int = 0,
        load_whole: bool = False,
    ) -> Step:
        """A step of training.

        Args:
            plan: of this step.
            reading: the rank's stages that read the batch.
            length: of its sequences; 0 without buckets.
            load_whole: whether micro-batches are loaded whole, even if they are split.

        Raises:
            ScheduleError: see :func:`pipectl.schedule.lower`.
        """
        sizes = _sizes(plan, length)
        whole = cls.plain(lower(plan, rank), channels(plan), rank, sizes)

        def with_rows(item: LocalLane) -> LocalLane:
            portion_of_each = messages_of(plan, whole.channels[item.channel], plan.micro_batches)
            return item._replace(carried=_rows_of(portion_of_each, sizes))

        local = {key: [with_rows(item) for item in items] for key, items in whole.local.items()}
        pieces = _pieces(plan, rank, reading, length)
        if load_whole:
            pieces = {index: sizes[index] for index in pieces}
        rows = whole.actions.rows.tolist()
        summed = {row[1] for row in rows if row[0] == Kind.REDUCE_START}
        closing = {row[1]: row[2] for row in rows if row[0] == Kind.BACKWARD and row[1] in summed}
        heads = _heads(plan, whole.channels, rank, sizes)
        return replace(whole, plan=plan, pieces=pieces, local=local, heads=heads, closing=closing)

    @classmethod
    def plain(
        cls, actions: Actions, channels: Sequence[Channel], rank: int, sizes: Sequence[Rows]
    ) -> Step:
        """Other rows, over channels that all carry every micro-batch as a whole."""
        local: dict[tuple[TransferKind, int], list[LocalLane]] = {}
        for index, channel in enumerate(channels):
            if channel.is_local and channel.source_rank == rank:
                key = channel.kind, channel.source_stage
                local.setdefault(key, []).append(LocalLane(index, lane_of(channel)))
        return cls(actions, channels, sizes, local=local)

    @property
    def positions(self) -> list[range]:
        """The loaded pieces as positions within the batch."""
        assert self.plan is not None
        assert self.pieces is not None
        whole = micro_batches_of(self.plan.batch_size, self.plan.micro_batch_size)
        return [whole[i][piece.start : piece.stop] for i, piece in self.pieces.items()]


@dataclass
class StepInput:
    """What one execution of a step works on.

    Args:
        weights: weight in the loss of every micro-batch, or of this rank's part of it; empty in
            evaluation.
        batches: yields (inputs, targets) of every piece; empty if no stage reads them.
        seed: parts from which random operators are seeded, the step last.
        per_step: micro-batches of a step, if these are several, counted through.
        scale: of the loss in backwards.
        recording: is told when every row began and ended.
    """

    weights: Sequence[float]
    batches: Iterator[Batch]
    seed: tuple[int | str, ...]
    scale: float = 1.0
    recording: Recording | None = None
    per_step: int | None = None

    def seed_of(self, micro_batch: int) -> int:
        """What random operators of one micro-batch are seeded from, however steps overlap."""
        if self.per_step is None:
            return seed_of(*self.seed, micro_batch)
        step, index = divmod(micro_batch, self.per_step)
        *before, first = self.seed
        assert isinstance(first, int)
        return seed_of(*before, first + step, index)


class Loaded:
    """The loaded pieces of one step, each until its last reader.

    Args:
        batches: yields the pieces in order.
        pieces: what each is; None if all are whole micro-batches, in order.
    """

    def __init__(self, batches: Iterator[Batch], pieces: Mapping[int, Rows] | None) -> None:
        self._batches = batches
        self._pieces = pieces
        self._waiting = count() if pieces is None else iter(pieces)
        self._pending: dict[int, Batch] = {}

    def part(self, micro_batch: int, rows: Rows) -> Batch:
        """Some samples of a micro-batch."""
        while micro_batch not in self._pending:
            index = next(self._waiting)
            self._pending[index] = next(self._batches)
        batch = self._pending[micro_batch]
        if rows.is_whole or self._pieces is None:
            return batch
        inputs, targets = narrowed(batch, rows, self._pieces[micro_batch])
        return inputs, targets

    def drop(self, micro_batch: int) -> None:
        """The last action that reads a micro-batch is over."""
        self._pending.pop(micro_batch, None)


def narrowed(batch: Any, rows: Rows, piece: Rows) -> Any:
    """Some rows of every tensor of a loaded piece."""
    if rows == piece:
        return batch
    part = slice(rows.start - piece.start, rows.stop - piece.start)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[part], batch)


def parts_of(plan: Plan, rank: int, stage: int, length: int = 0) -> dict[int, Rows]:
    """What a rank computes of a stage, by micro-batch; nothing of others' stages.

    Args:
        length: of sequences; 0 without buckets.
    """
    for role in roles(plan, rank):
        if role.stage == stage and role.kind is Kind.FORWARD:
            mine = portion(plan, stage, role.replica, plan.micro_batches)
            return _rows_of(mine, _sizes(plan, length))
    return {}


def _sizes(plan: Plan, length: int) -> list[Rows]:
    parts = micro_batches_of(plan.batch_size, plan.micro_batch_size)
    return [Rows.of(len(part), length) for part in parts]


def lane_of(channel: Channel) -> Lane:
    """The lane of a channel."""
    return Lane(channel.kind, channel.source_stage, channel.target_stage)


def _rows_of(part: Portion, sizes: Sequence[Rows]) -> dict[int, Rows]:
    index = part.micro_batches
    start, stop = (np.broadcast_to(np.asarray(edge), index.shape) for edge in part[1:])
    return {
        i: sizes[i] if first < 0 else sizes[i]._replace(start=first, stop=last)
        for i, first, last in zip(index.tolist(), start.tolist(), stop.tolist(), strict=True)
    }


def _pieces(plan: Plan, rank: int, reading: Sequence[int], length: int) -> dict[int, Rows]:
    """The smallest range of each micro-batch that serves all of the rank's reading stages."""
    pieces: dict[int, Rows] = {}
    for stage in reading:
        for index, part in parts_of(plan, rank, stage, length).items():
            known = pieces.get(index, part)
            start, stop = min(known.start, part.start), max(known.stop, part.stop)
            pieces[index] = part._replace(start=start, stop=stop)
    return dict(sorted(pieces.items()))


def _heads(
    plan: Plan, ends: Sequence[Channel], rank: int, sizes: Sequence[Rows]
) -> dict[tuple[int, int], int]:
    """Of the end of every channel of a rank that reads values and makes gradients."""
    if plan.replication is Replication.WHOLE:
        return {}
    heads = {}
    for index, channel in enumerate(ends):
        if rank not in (channel.source_rank, channel.target_rank):
            continue
        source = channel.source_stage, channel.source_replica
        target = channel.target_stage, channel.target_replica
        mine = _rows_of(portion(plan, *max(source, target), plan.micro_batches), sizes)
        heads.update({(index, i): rows.start for i, rows in mine.items()})
    return heads
