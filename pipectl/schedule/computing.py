"""What one rank computes in a step, in which order; messages come with lowering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipectl.plan import Plan
from pipectl.schedule.actions import Actions, Integers, Kind, Program
from pipectl.schedule.order import Order
from pipectl.schedule.placement import Portion, Role, portion, roles
from pipectl.schedule.registry import order_of


class Block(NamedTuple):
    """All actions of one role by rising micro-batch, and the slot of each."""

    role: Role
    portion: Portion
    slots: Integers

    def slots_of(self, micro_batches: Integers) -> Integers:
        """Slots of some of its micro-batches."""
        if len(micro_batches) == len(self.slots):
            return self.slots
        slots: Integers = self.slots[np.searchsorted(self.portion.micro_batches, micro_batches)]
        return slots


@dataclass(frozen=True)
class Computation:
    """The actions of a rank; a *slot* is an action's place among them.

    Args:
        blocks: by kind and stage.
        turns: of every slot, rising.
        micro_batches: of the step.
    """

    blocks: dict[tuple[Kind, int], Block]
    turns: Integers
    order: Order
    micro_batches: int

    def __len__(self) -> int:
        return len(self.turns)

    @classmethod
    def of(
        cls, parts: Sequence[tuple[Role, Portion]], order: Order, micro_batches: int
    ) -> Computation:
        """Sorts the actions of some roles by their turns."""
        turns = np.concatenate(
            [np.zeros(0, dtype=np.int64)]
            + [order.turns(role.kind, role.stage, mine.micro_batches) for role, mine in parts]
        )
        by_turn = turns.argsort()
        slots = np.empty_like(by_turn)
        slots[by_turn] = np.arange(len(turns))
        blocks, first = {}, 0
        for role, mine in parts:
            last = first + len(mine.micro_batches)
            blocks[role.kind, role.stage] = Block(role, mine, slots[first:last])
            first = last
        return cls(blocks, turns[by_turn], order, micro_batches)


def training(plan: Plan, rank: int, micro_batches: int) -> Computation:
    """What a rank computes in a training step.

    Raises:
        ScheduleError: if the plan names no known schedule, or its stages do not suit it.
    """
    order = order_of(plan, micro_batches)
    parts = [
        (role._replace(kind=kind), portion(plan, role.stage, role.replica, micro_batches))
        for role in roles(plan, rank)
        for kind in order.parts(role.kind)
    ]
    return Computation.of(parts, order, micro_batches)


def evaluating(stages: Sequence[int], micro_batches: int, *, of: int) -> Computation:
    """What a rank that holds ``stages``, ``of`` so many, computes in an evaluation.

    Forwards only, micro-batch after micro-batch; four stages, four micro-batches::

        stage 0  0123
        stage 1  .0123
        stage 2  ..0123
        stage 3  ...0123
    """

    def forward(stage: int, micro_batch: Integers) -> Integers:
        return micro_batch * of + stage

    every = Portion(np.arange(micro_batches))
    parts = [(Role(Kind.EVALUATE, stage, 0), every) for stage in stages]
    return Computation.of(parts, Order(forward, forward), micro_batches)


def compute_actions(plan: Plan, rank: int, micro_batches: int | None = None) -> Actions:
    """The same as rows, without messages, recomputation and UPDATE.

    Args:
        micro_batches: of this step; by default the plan's.

    Raises:
        ScheduleError: see :func:`training`.
    """
    return _rows(training(plan, rank, micro_batches or plan.micro_batches))


def compute_programs(plan: Plan, micro_batches: int | None = None) -> list[Program]:
    """:func:`compute_actions` of every rank."""
    return [Program(compute_actions(plan, rank, micro_batches)) for rank in range(plan.ranks)]


def _rows(computation: Computation) -> Actions:
    columns = {
        name: np.full(len(computation), -1)
        for name in ("kind", "stage", "micro_batch", "start", "stop")
    }
    for (kind, stage), block in computation.blocks.items():
        values = (kind, stage, *block.portion)
        for column, value in zip(columns.values(), values, strict=True):
            column[block.slots] = value
    return Actions.of_columns(**columns)
