"""One pass of a rank: its actions, their channels, and what it reads of the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture.data import micro_batches_of
from pipectl.plan import Plan
from pipectl.runtime.wiring import Range, Wiring, ranges
from pipectl.schedule import Actions, Kind, lower, portion, roles

Batch = tuple[Any, Any]


@dataclass(frozen=True, eq=False)
class Pass:
    """What a rank does in a step of so many samples.

    Args:
        plan: of this step.
        sizes: samples of every micro-batch.
        pieces: what is loaded at once: a range of samples of each micro-batch that is needed, by
            rising micro-batch.
    """

    plan: Plan
    actions: Actions
    wiring: Wiring
    sizes: tuple[int, ...]
    pieces: Mapping[int, Range]

    @property
    def positions(self) -> list[range]:
        """The pieces as positions within the batch."""
        whole = micro_batches_of(self.plan.batch_size, self.plan.micro_batch_size)
        return [
            whole[i] if piece.start < 0 else whole[i][piece.start : piece.stop]
            for i, piece in self.pieces.items()
        ]


def pass_of(plan: Plan, rank: int, reading: Sequence[int], *, whole: bool = False) -> Pass:
    """The pass of one rank.

    Args:
        plan: of this step.
        reading: the rank's stages that read the batch.
        whole: whether micro-batches are loaded whole, also where they are split.

    Raises:
        ScheduleError: see :func:`pipectl.schedule.lower`.
    """
    actions = lower(plan, rank).body
    sizes = map(len, micro_batches_of(plan.batch_size, plan.micro_batch_size))
    wiring = Wiring.of(plan, rank, actions)
    pieces = _pieces(plan, rank, reading)
    if whole:
        pieces = dict.fromkeys(pieces, Range())
    return Pass(plan, actions, wiring, tuple(sizes), pieces)


def parts_of(plan: Plan, rank: int, stage: int) -> dict[int, Range]:
    """What a rank computes of a stage, by micro-batch; nothing of others' stages."""
    for role in roles(plan, rank):
        if role.stage == stage and role.kind is Kind.FORWARD:
            return ranges(portion(plan, stage, role.replica, plan.micro_batches))
    return {}


class Loaded:
    """The loaded pieces of one pass, each until its last reader.

    Args:
        batches: yields the pieces in order.
        pieces: what each is; None if all are whole micro-batches, in order.
    """

    def __init__(self, batches: Iterator[Batch], pieces: Mapping[int, Range] | None) -> None:
        self._batches = batches
        self._pieces = pieces
        self._waiting = count() if pieces is None else iter(pieces)
        self._reads: Counter[int] = Counter()
        self._held: dict[int, Batch] = {}

    def expect(self, reads: Mapping[int, int]) -> None:
        """Say how often each micro-batch will be asked for, before it is dropped."""
        self._reads.update(reads)

    def part(self, micro_batch: int, wanted: Range) -> Batch:
        """Some samples of a micro-batch."""
        while micro_batch not in self._held:
            index = next(self._waiting)
            self._held[index] = next(self._batches)
        batch = self._held[micro_batch]
        piece = Range() if self._pieces is None else self._pieces[micro_batch]
        if wanted == piece or wanted.start < 0:
            return batch
        first = max(0, piece.start)
        inputs, targets = narrowed(batch, wanted.start - first, wanted.stop - first)
        return inputs, targets

    def done(self, micro_batch: int) -> None:
        """One action that may have read a micro-batch is over."""
        self._reads[micro_batch] -= 1
        if not self._reads[micro_batch]:
            del self._reads[micro_batch]
            self._held.pop(micro_batch, None)


def narrowed(batch: Any, start: int, stop: int) -> Any:
    """Rows of every tensor of a batch."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[start:stop], batch)


def _pieces(plan: Plan, rank: int, reading: Sequence[int]) -> dict[int, Range]:
    """The smallest range of each micro-batch that serves all of the rank's reading stages."""
    found: dict[int, Range] = {}
    for stage in reading:
        for index, part in parts_of(plan, rank, stage).items():
            known = found.get(index, part)
            whole = known.start < 0 or part.start < 0
            found[index] = (
                Range()
                if whole
                else Range(min(known.start, part.start), max(known.stop, part.stop))
            )
    return dict(sorted(found.items()))
