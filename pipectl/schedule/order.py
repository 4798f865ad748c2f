"""Orders: a schedule as one sequence of all that all ranks compute in a step.

A schedule gives every action a *turn*. A rank computes its own actions by rising turn. An order is
sound if an action has a later turn than each that it depends on, whichever ranks they are on; then
any placement of the stages can run it, and a wait for something of an earlier turn cannot close a
circle. Actions that do not depend on each other may share a turn unless they share a rank.

A schedule may split backwards: the *input half* makes the gradients that earlier stages wait for,
the *weight half* those of the parameters, which nobody waits for before the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipectl.schedule.actions import Integers, Kind

Turns = Callable[[int, Integers], Integers]
"""(stage, its micro-batches) -> turns, from 0, rising with the micro-batch."""


@dataclass(frozen=True)
class Order:
    """The turns of forwards (or evaluations) and of backwards.

    Args:
        backward: of whole backwards, or of their input halves.
        weight: of weight halves, each behind its input half; None where backwards are whole.
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
        """What a backward ends with: behind it the parameters' gradients are complete."""
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


def first_forwards(order: Order, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Forwards of each stage before its first backward."""
    index = np.arange(micro_batches)
    return tuple(
        int((order.forward(stage, index) < order.backward(stage, index[:1])).sum())
        for stage in range(stages)
    )
