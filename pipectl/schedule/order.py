"""Orders: a schedule as one sequence of all that all ranks compute in a step.

A schedule gives every action a *turn*. A rank computes its own actions by rising turn. An order is
sound if an action has a later turn than each that it depends on, whichever ranks they are on; then
any placement of the stages can run it, and a wait for something of an earlier turn cannot close a
circle. Actions that do not depend on each other may share a turn unless they share a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipectl.schedule.actions import Integers, Kind

Turns = Callable[[int, Integers], Integers]
"""(stage, its micro-batches) -> turns, from 0, rising with the micro-batch."""


@dataclass(frozen=True)
class Order:
    """The turns of forwards (or evaluations) and of backwards."""

    forward: Turns
    backward: Turns

    def turns(self, kind: Kind, stage: int, micro_batches: Integers) -> Integers:
        """Turns of one stage's actions of a kind."""
        turns = self.backward if kind is Kind.BACKWARD else self.forward
        return turns(stage, micro_batches)
