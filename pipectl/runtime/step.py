"""A step of one rank, and one execution of it.

A :class:`Step` follows from the plan and the number of samples, and is made once per number. A
:class:`StepRun` is the input and state of one execution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pipectl.capture.data import micro_batches_of
from pipectl.capture.randomness import seed_of
from pipectl.capture.slices import Span
from pipectl.lanes import Lane, TransferKind
from pipectl.plan import Plan, Replication
from pipectl.runtime.layout import Tensors
from pipectl.runtime.tracing import Recording
from pipectl.runtime.transport import Posted
from pipectl.schedule import (
    Actions,
    Channel,
    Kind,
    Portion,
    channels,
    lower,
    messages,
    portion,
    roles,
)
from pipectl.torch_api import pytree

Batch = tuple[Any, Any]
ArrivalKey = tuple[bool, int, int]
"""Key of received values: whether they are gradients, stage, micro-batch."""


@dataclass(frozen=True, eq=False)
class Step:
    """The work of a rank for some number of samples.

    Args:
        actions: of one step; empty if steps overlap and come in parts.
        channels: to which the channel column refers.
        sizes: every micro-batch as a whole.
        plan: of this step; None for evaluations, renewals and overlapping steps, which take every
            micro-batch as a whole.
        loads: what is loaded together: some samples of each micro-batch that is needed, by rising
            micro-batch.
        losses: the samples of each micro-batch whose loss this rank computes, in order; not used if
            steps overlap.
    """

    actions: Actions
    channels: Sequence[Channel]
    rank: int
    sizes: Sequence[Span]
    plan: Plan | None = None
    loads: Mapping[int, Span] = field(default_factory=dict)
    losses: Mapping[int, Span] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        plan: Plan,
        rank: int,
        reading: Sequence[int],
        loss_stage: int,
        *,
        length: int = 0,
        load_whole: bool = False,
    ) -> Step:
        """A step of training.

        Args:
            reading: the rank's stages that read the batch.
            loss_stage: the stage that computes the loss.
            length: of its sequences; 0 without buckets.
            load_whole: whether micro-batches are loaded whole, even if they are split.

        Raises:
            ScheduleError: see :func:`pipectl.schedule.lower`.
        """
        sizes, losses = _sizes(plan, length), parts_of(plan, rank, loss_stage, length)
        loads = loads_of(plan, rank, reading, length, load_whole=load_whole)
        actions = lower(plan, rank)
        computed = (
            row[2] for row in actions.rows.tolist() if row[:2] == [Kind.FORWARD, loss_stage]
        )
        losses = {number: losses[number] for number in computed}
        return cls(actions, channels(plan), rank, sizes, plan, loads, losses)

    @property
    def positions(self) -> list[range]:
        """What is loaded together, as positions within the batch."""
        assert self.plan is not None
        whole = micro_batches_of(self.plan.batch_size, self.plan.micro_batch_size)
        return [whole[i][load.start : load.stop] for i, load in self.loads.items()]

    @cached_property
    def local(self) -> dict[tuple[TransferKind, int], list[tuple[int, Mapping[int, Span]]]]:
        """Channels with both ends on this rank, with the samples that they carry of every
        micro-batch, by kind and source stage.
        """
        local: dict[tuple[TransferKind, int], list[tuple[int, Mapping[int, Span]]]] = {}
        for index, channel in enumerate(self.channels):
            if channel.is_local and channel.source_rank == self.rank:
                carried = dict(enumerate(self.sizes))
                if self.plan is not None:
                    each = messages(self.plan, channel, self.plan.micro_batches)
                    carried = _spans_of(each, self.sizes)
                key = channel.kind, channel.source_stage
                local.setdefault(key, []).append((index, carried))
        return local

    @cached_property
    def heads(self) -> dict[tuple[int, int], int]:
        """By channel and micro-batch, the first sample of the part of the replica at its end.

        The end is the stage that reads values and computes gradients. Empty if nothing is split.
        """
        heads: dict[tuple[int, int], int] = {}
        if self.plan is None or self.plan.replication is Replication.WHOLE:
            return heads
        for index, channel in enumerate(self.channels):
            if self.rank in (channel.source_rank, channel.target_rank):
                source = channel.source_stage, channel.source_replica
                target = channel.target_stage, channel.target_replica
                mine = portion(self.plan, *max(source, target), self.plan.micro_batches)
                parts = _spans_of(mine, self.sizes)
                heads.update({(index, i): span.start for i, span in parts.items()})
        return heads

    @cached_property
    def closing(self) -> dict[int, int]:
        """The micro-batch of the last backward of every stage whose gradients are summed."""
        rows = self.actions.rows.tolist()
        summed = {row[1] for row in rows if row[0] == Kind.REDUCE_START}
        return {row[1]: row[2] for row in rows if row[0] == Kind.BACKWARD and row[1] in summed}


class Arrived(NamedTuple):
    """Values of a micro-batch that arrived from one replica."""

    span: Span
    tensors: Tensors


class Outcome(NamedTuple):
    """How a step ended on a rank.

    Args:
        learning_rate: of its update; NaN if the rank updates nothing.
        gradient_norm: of all gradients, before clipping; NaN if gradients are not clipped.
        skipped: whether no parameter was updated.
    """

    learning_rate: float
    gradient_norm: float
    skipped: bool


Update = Callable[["StepRun", int, int], Outcome | None]
"""Ends a step at an UPDATE of a stage and a micro-batch."""


@dataclass
class StepRun:
    """One execution of a step.

    Args:
        weights: weight in the loss of every micro-batch, or of this rank's part of it; empty in
            evaluation.
        batches: yields (inputs, targets) of every load; empty if no stage reads them.
        seed: parts of the seed of random operators, the step last.
        scale: of the loss in backwards.
        update: called at every UPDATE with this run, its stage and micro-batch.
        compare_readings: called with every micro-batch before its loss is computed, and before the
            backward that begins with it.
        loads_for_others: whether every evaluation loads its micro-batch, for other ranks.
        recording: records the start and end of every row.
        per_step: micro-batches per step, if the run has several steps; they are numbered across
            steps.

    Attributes:
        inbox: received values for computations.
        outbox: the first sample and the results of the last computation, which the following rows
            send.
        sends, receives: under way, by channel and micro-batch.
        losses: of every micro-batch, or part of one, that this rank computes, in order.
        outcome: of the last step that has ended.
        called_s, called_cpu_s: time in calls of forwards and backwards, and the thread's processor
            time in it.
        worked_s: time that an accelerator spent on them.
    """

    step: Step
    weights: Sequence[float] = ()
    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))
    seed: tuple[int | str, ...] = ()
    scale: float = 1.0
    update: Update = lambda *_: None
    compare_readings: Callable[[int], None] = lambda _: None
    loads_for_others: bool = False
    recording: Recording | None = None
    per_step: int | None = None
    inbox: dict[ArrivalKey, list[Arrived]] = field(default_factory=dict)
    outbox: tuple[int, Tensors] = (0, {})
    sends: dict[tuple[int, int], Posted] = field(default_factory=dict)
    receives: dict[tuple[int, int], Posted] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    outcome: Outcome | None = None
    called_s: float = 0.0
    called_cpu_s: float = 0.0
    worked_s: float = 0.0

    def __post_init__(self) -> None:
        self._order = iter(self.step.loads)
        self._loaded: dict[int, Batch] = {}

    def seed_of(self, micro_batch: int) -> int:
        """The seed of random operators in a micro-batch, independent of how steps overlap."""
        if self.per_step is None:
            return seed_of(*self.seed, micro_batch)
        step, index = divmod(micro_batch, self.per_step)
        *before, first = self.seed
        assert isinstance(first, int)
        return seed_of(*before, first + step, index)

    def load(self, micro_batch: int, span: Span) -> Batch:
        """The batch of some samples of a micro-batch."""
        while micro_batch not in self._loaded:
            index = next(self._order)
            self._loaded[index] = next(self.batches)
        inputs, targets = narrowed(self._loaded[micro_batch], span, self.step.loads[micro_batch])
        return inputs, targets

    def drop(self, micro_batch: int) -> None:
        """Free a micro-batch after the last action that reads it."""
        self._loaded.pop(micro_batch, None)


def narrowed(batch: Any, span: Span, loaded: Span) -> Any:
    """Some samples of every tensor of those that were loaded together."""
    if span == loaded:
        return batch
    part = slice(span.start - loaded.start, span.stop - loaded.start)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[part], batch)


def parts_of(plan: Plan, rank: int, stage: int, length: int = 0) -> dict[int, Span]:
    """The samples that a rank computes of a stage, by micro-batch; empty for stages of other ranks.

    Args:
        length: of sequences; 0 without buckets.
    """
    for role in roles(plan, rank):
        if role.stage == stage and role.kind is Kind.FORWARD:
            mine = portion(plan, stage, role.replica, plan.micro_batches)
            return _spans_of(mine, _sizes(plan, length))
    return {}


def loads_of(
    plan: Plan, rank: int, reading: Sequence[int], length: int = 0, *, load_whole: bool
) -> dict[int, Span]:
    """What a rank loads: some samples of each micro-batch that it needs, by rising micro-batch.

    Args:
        reading, length, load_whole: see :meth:`Step.of`.
    """
    loads: dict[int, Span] = {}
    for stage in reading:  # the smallest range of each micro-batch that contains all of them
        for index, part in parts_of(plan, rank, stage, length).items():
            known = loads.get(index, part)
            start, stop = min(known.start, part.start), max(known.stop, part.stop)
            loads[index] = part._replace(start=start, stop=stop)
    sizes = _sizes(plan, length)
    return {i: sizes[i] if load_whole else loads[i] for i in sorted(loads)}


def lane_of(channel: Channel) -> Lane:
    """The lane of a channel."""
    return Lane(channel.kind, channel.source_stage, channel.target_stage)


def _sizes(plan: Plan, length: int) -> list[Span]:
    parts = micro_batches_of(plan.batch_size, plan.micro_batch_size)
    return [Span.of(len(part), length) for part in parts]


def _spans_of(part: Portion, sizes: Sequence[Span]) -> dict[int, Span]:
    index = part.micro_batches
    start, stop = (np.broadcast_to(np.asarray(edge), index.shape) for edge in part[1:])
    return {
        i: sizes[i] if first < 0 else sizes[i]._replace(start=first, stop=last)
        for i, first, last in zip(index.tolist(), start.tolist(), stop.tolist(), strict=True)
    }
