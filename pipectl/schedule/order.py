"""Orders, one sequence of all that all ranks compute in a step, and schedules, which make them.

An order gives every action a *turn*. A rank computes its own actions by rising turn. An order is
sound if an action has a later turn than each that it depends on, whichever ranks they are on; then
any placement of the stages can run it, and a wait for something of an earlier turn cannot close a
circle. Actions that do not depend on each other may share a turn unless they share a rank.

A schedule may split backwards: the *input half* makes the gradients that earlier stages wait for,
the *weight half* those of the parameters, which nobody waits for before the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pipectl.schedule.actions import Integers, Kind

Turns = Callable[[int, Integers], Integers]
"""(stage, its micro-batches) -> turns, from 0, rising with the micro-batch."""
WarmUp = tuple[int, ...]
"""Forwards of every stage before its first backward."""


@dataclass(frozen=True)
class Order:
    """The turns of forwards (or evaluations) and of backwards.

    Args:
        backward: of whole backwards, or of their input halves.
        weight: of weight halves, each after its input half; None where backwards are whole.
    """

    forward: Turns
    backward: Turns
    weight: Turns | None = None

    @property
    def first_half(self) -> Kind:
        """What a backward begins with: it reads gradients and makes those that are sent."""
        return Kind.BACKWARD if self.weight is None else Kind.BACKWARD_INPUT

    @property
    def last_half(self) -> Kind:
        """What a backward ends with: after it the parameters' gradients are complete."""
        return Kind.BACKWARD if self.weight is None else Kind.BACKWARD_WEIGHT

    def parts(self, kind: Kind) -> tuple[Kind, ...]:
        """The kinds of action that make up a forward or a backward."""
        if kind is Kind.BACKWARD and self.weight is not None:
            return Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
        return (kind,)

    def turns(self, kind: Kind, stage: int, micro_batches: Integers) -> Integers:
        """Turns of one stage's actions of a kind."""
        if kind is Kind.BACKWARD_WEIGHT and self.weight is not None:
            return self.weight(stage, micro_batches)
        backward = kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        return (self.backward if backward else self.forward)(stage, micro_batches)

    def warm_up(self, stages: int, micro_batches: int) -> WarmUp:
        """Forwards of each stage before its first backward."""
        index = np.arange(micro_batches)
        return tuple(
            int((self.forward(stage, index) < self.backward(stage, index[:1])).sum())
            for stage in range(stages)
        )


@dataclass(frozen=True)
class Shape:
    """What an order and its warm-ups depend on.

    Args:
        ranks: over which the stages lie, one replica each.
        micro_batches: of the step; where steps overlap, of several.
        replicas: of every stage, if they take whole micro-batches in turn.
        apart: stages whose backward has a rank of its own.
    """

    stages: int
    ranks: int
    micro_batches: int
    replicas: tuple[int, ...] | None = None
    apart: tuple[bool, ...] | None = None


class Placement(StrEnum):
    """How the stages lie on the ranks, four stages for example."""

    STRAIGHT = "straight"
    """0, 1, 2, 3: each has a rank of its own."""
    ROUND = "round"
    """0, 1, 0, 1."""
    V_SHAPED = "v"
    """0, 1, 1, 0: the rank that computes the loss also begins the model."""

    def ranks(self, stages: int, ranks: int) -> tuple[int, ...] | None:
        """The rank of every stage; None if the stages do not lie so on as many ranks."""
        if self is Placement.STRAIGHT:
            return tuple(range(stages)) if stages == ranks else None
        if self is Placement.ROUND:
            return tuple(s % ranks for s in range(stages)) if stages % ranks == 0 else None
        down = range(ranks)
        return (*down, *reversed(down)) if stages == 2 * ranks else None

    def fit(self, stages: int, ranks: int) -> tuple[int, ...] | None:
        """As :meth:`ranks`, on as many of the ranks as the stages need; None if they do not fit."""
        needed = stages // 2 if self is Placement.V_SHAPED else min(stages, ranks)
        return self.ranks(stages, needed) if needed <= ranks else None

    def misfit(self, stages: int, ranks: int) -> str:
        """What to say of stages that do not fit on ranks."""
        words = {
            Placement.STRAIGHT: "need as many ranks",
            Placement.ROUND: f"cannot go round over {ranks} ranks",
            Placement.V_SHAPED: f"cannot lie in a V over {ranks} ranks",
        }
        return f"{stages} stages {words[self]}"


@dataclass(frozen=True)
class Staleness:
    """Which weights are used where steps overlap. Versions are counted by updates.

    Args:
        version: (warm-up of the stage, steps) -> the version that the steps use, from 0 where the
            pipeline was empty.
        kept: (warm-up of the stage, whether its backward is apart) -> of how many of the newest
            versions a forward or backward may ask on the rank that updates.
        words: (warm-up of all stages) -> how old gradients are.
        one_micro_batch: whether a step has no more than one.
    """

    version: Callable[[int, Integers], Integers]
    kept: Callable[[int, bool], int]
    words: Callable[[Sequence[int]], str]
    one_micro_batch: bool = False


@dataclass(frozen=True)
class Schedule:
    """All that tells a schedule from others.

    Args:
        order: of a shape and a warm-up; schedules whose warm-up follows from the shape do not look
            at it.
        warm_ups: of a shape, those worth trying; the first, with the least memory, is the default.
        placement: of the stages.
        stages_per_rank: numbers worth trying; the first is the default.
        splits_backward: whether backwards are made in halves.
        chooses_warm_up: whether any warm-up that does not rise from stage to stage will do.
        is_local: whether what a rank does follows from its stages and their neighbours alone.
        staleness: if steps overlap; None if each is flushed.
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

    @property
    def allows_backward_elsewhere(self) -> bool:
        """Whether backwards may have ranks of their own."""
        return self.placement is Placement.STRAIGHT and not self.splits_backward
