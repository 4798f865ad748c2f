"""Orders (one sequence of all computations of all ranks in a step), and schedules, which make them.

An order assigns a *turn* to every action. A rank computes its own actions by ascending turn. An
order is sound if every action has a later turn than each action that it depends on, on any rank.
Then any placement of the stages can run it, and waits for earlier turns cannot form a cycle.
Independent actions may share a turn unless they share a rank.

A schedule may split backwards. The *input half* computes the gradients that earlier stages wait
for; the *weight half* computes the parameter gradients, which are needed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipectl.older_python import StrEnum
from pipectl.schedule.actions import Integers, Kind

Turns = Callable[[int, Integers], Integers]
"""(stage, its micro-batches) -> turns, from 0, ascending with the micro-batch."""
WarmUp = tuple[int, ...]
"""Forwards of each stage before its first backward."""


@dataclass(frozen=True)
class Order:
    """The turns of forwards (or evaluations) and of backwards.

    Args:
        backward: of whole backwards, or of their input halves.
        weight: of weight halves, each after its input half; None if backwards are whole.
    """

    forward: Turns
    backward: Turns
    weight: Turns | None = None

    @property
    def first_half(self) -> Kind:
        """Kind of action that begins a backward: it reads and sends gradients."""
        return Kind.BACKWARD if self.weight is None else Kind.BACKWARD_INPUT

    @property
    def last_half(self) -> Kind:
        """Kind of action that ends a backward: it completes the parameter gradients."""
        return Kind.BACKWARD if self.weight is None else Kind.BACKWARD_WEIGHT

    def parts(self, kind: Kind) -> tuple[Kind, ...]:
        """Return the kinds of action that make up a forward or a backward."""
        if kind is Kind.BACKWARD and self.weight is not None:
            return Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
        return (kind,)

    def turns(self, kind: Kind, stage: int, micro_batches: Integers) -> Integers:
        """Return the turns of one stage's actions of a kind."""
        if kind is Kind.BACKWARD_WEIGHT and self.weight is not None:
            return self.weight(stage, micro_batches)
        backward = kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        return (self.backward if backward else self.forward)(stage, micro_batches)

    def warm_up(self, stages: int, micro_batches: int) -> WarmUp:
        """Return the forwards of each stage before its first backward."""
        index = np.arange(micro_batches)
        return tuple(
            int((self.forward(stage, index) < self.backward(stage, index[:1])).sum())
            for stage in range(stages)
        )


@dataclass(frozen=True)
class Shape:
    """What an order and its warm-ups depend on.

    Args:
        ranks: number of ranks, with one replica per stage.
        micro_batches: number in the step, or in several steps if they overlap.
        replicas: number per stage, if they take whole micro-batches in turn.
        apart: whether the backward of each stage runs on a rank of its own.
    """

    stages: int
    ranks: int
    micro_batches: int
    replicas: tuple[int, ...] | None = None
    apart: tuple[bool, ...] | None = None


class Placement(StrEnum):
    """How stages are placed on ranks, for example four stages."""

    STRAIGHT = "straight"
    """0, 1, 2, 3: one stage per rank."""
    ROUND = "round"
    """0, 1, 0, 1: round-robin."""
    V_SHAPED = "v"
    """0, 1, 1, 0: the rank that begins the model also computes the loss."""

    def ranks(self, stages: int, ranks: int) -> tuple[int, ...] | None:
        """Return the rank of each stage; None if the stages do not fit on exactly these ranks."""
        if self is Placement.STRAIGHT:
            return tuple(range(stages)) if stages == ranks else None
        if self is Placement.ROUND:
            return tuple(s % ranks for s in range(stages)) if stages % ranks == 0 else None
        down = range(ranks)
        return (*down, *reversed(down)) if stages == 2 * ranks else None

    def fit(self, stages: int, ranks: int) -> tuple[int, ...] | None:
        """Return the rank of each stage, on as many ranks as needed; None if there are too few."""
        needed = stages // 2 if self is Placement.V_SHAPED else min(stages, ranks)
        return self.ranks(stages, needed) if needed <= ranks else None

    def misfit(self, stages: int, ranks: int) -> str:
        """Return a message for stages that do not fit on ranks."""
        words = {
            Placement.STRAIGHT: "need as many ranks",
            Placement.ROUND: f"cannot go round over {ranks} ranks",
            Placement.V_SHAPED: f"cannot lie in a V over {ranks} ranks",
        }
        return f"{stages} stages {words[self]}"


@dataclass(frozen=True)
class Staleness:
    """The weights in use if steps overlap. Versions count updates.

    Args:
        version: (warm-up of the stage, steps) -> version that the steps use, from 0.
        kept: (warm-up of the stage, whether its backward is apart) -> number of newest versions
            that a forward or backward may request on the rank that updates.
        words: (warm-up of all stages) -> description of the age of the gradients.
        one_micro_batch: whether a step has only one micro-batch.
    """

    version: Callable[[int, Integers], Integers]
    kept: Callable[[int, bool], int]
    words: Callable[[Sequence[int]], str]
    one_micro_batch: bool = False


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule.

    Args:
        order: (shape, warm-up) -> order; ignores the warm-up if it follows from the shape.
        warm_ups: shape -> warm-ups to try; the first, with the least memory, is the default.
        stages_per_rank: numbers to try; the first is the default.
        splits_backward: whether backwards are split into halves.
        chooses_warm_up: whether any warm-up that does not rise from stage to stage is valid.
        is_local: whether a rank's program depends only on its stages and their neighbours.
        staleness: if steps overlap; None if each step is flushed.
    """

    name: str
    order: Callable[[Shape, Sequence[int]], Order]
    warm_ups: Callable[[Shape], list[WarmUp]]
    placement: Placement = Placement.STRAIGHT
    stages_per_rank: tuple[int, ...] = (1,)
    splits_backward: bool = False
    chooses_warm_up: bool = False
    is_local: bool = False
    staleness: Staleness | None = None

    @property
    def flushes(self) -> bool:
        """Whether every step ends before the next begins."""
        return self.staleness is None
