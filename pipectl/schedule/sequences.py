"""Schedules that are lists: for every rank, all that it computes, one after the other.

Turns follow from the lists: they are the times at which the actions would start if messages took
no time, a forward and each half of a backward one unit, and a whole backward two. So lists that can
run give a sound order, and those that wait for each other are found out.

Lists of V-shaped schedules are made here, too. Of 2p stages, rank r holds stages r and 2p - 1 - r:
its first and its second *chunk*. Activations go down the ranks and come back up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl.schedule.actions import Integers, Kind
from pipectl.schedule.order import Order, Placement, Schedule, Shape, Turns, WarmUp

Table = npt.NDArray[np.int64]
Step = tuple[Kind, int]
"""What is done, and to which chunk."""
Orders = Callable[[int, int], Order]
"""(ranks, micro-batches) -> the order of a V's stages."""

F0, F1 = (Kind.FORWARD, 0), (Kind.FORWARD, 1)
I0, I1 = (Kind.BACKWARD_INPUT, 0), (Kind.BACKWARD_INPUT, 1)
W0, W1 = (Kind.BACKWARD_WEIGHT, 0), (Kind.BACKWARD_WEIGHT, 1)

FORWARD, BACKWARD, WEIGHT = range(3)
"""Parts of a micro-batch in a stage; ``BACKWARD`` is a whole one, or its input half."""
PART = np.full(len(Kind), -1, dtype=np.int64)
PART[[Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT]] = FORWARD, BACKWARD, BACKWARD
PART[Kind.BACKWARD_WEIGHT] = WEIGHT


class Execution(NamedTuple):
    """How far lists can be executed.

    Args:
        order: that follows; of all that is done.
        position: of every rank, its first action that is not done.
        is_done: of every part of every stage and micro-batch.
    """

    order: Order
    position: Table
    is_done: npt.NDArray[np.bool_]


def execute(sequences: Sequence[Integers], stages: int, micro_batches: int) -> Execution:
    """Compute on every rank what its list says, in a chain of stages.

    Args:
        sequences: of every rank: kind, stage and micro-batch of its actions; shape [actions, 3].
            Backwards are all whole, or all in halves, and all there.
    """
    from pipectl.schedule.sequences_kernel import run  # a compiler: only lists need it

    rows = np.concatenate(sequences).astype(np.int64)
    splits = bool((rows[:, 0] == Kind.BACKWARD_INPUT).any())
    duration = np.where(rows[:, 0] == Kind.BACKWARD, 2, 1)
    rows[:, 0] = PART[rows[:, 0]]
    ends = np.cumsum([len(sequence) for sequence in sequences])
    over_at = np.full((WEIGHT + 1, stages, micro_batches), -1, dtype=np.int64)
    first = np.concatenate([[0], ends[:-1]])
    turns, position = over_at.copy(), first.copy()
    run(rows, duration, position, ends, np.zeros_like(ends), over_at, turns)
    weight = _looked_up(turns[WEIGHT]) if splits else None
    order = Order(_looked_up(turns[FORWARD]), _looked_up(turns[BACKWARD]), weight)
    return Execution(order, position - first, over_at >= 0)


def _looked_up(table: Table) -> Turns:
    def turns(stage: int, micro_batches: Integers) -> Integers:
        looked_up: Integers = table[stage, micro_batches]
        return looked_up

    return turns


class Listing:
    """The actions of one rank of a V, while they are listed; a step takes the next micro-batch."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._stages = rank, 2 * ranks - 1 - rank
        self._next: dict[Step, int] = {}
        self._parts: list[Integers] = []

    def repeat(self, times: int, *steps: Step) -> None:
        """So many times, one after the other, some different steps."""
        rows = np.empty((times, len(steps), 3), dtype=np.int64)
        for place, (kind, chunk) in enumerate(steps):
            first = self._next.get((kind, chunk), 0)
            rows[:, place, 0], rows[:, place, 1] = kind, self._stages[chunk]
            rows[:, place, 2] = np.arange(first, first + times)
            self._next[kind, chunk] = first + times
        self._parts.append(rows.reshape(-1, 3))

    def up_to(self, micro_batches: int) -> Integers:
        """What was listed, without further micro-batches; shape [actions, 3]."""
        rows = np.concatenate(self._parts)
        kept: Integers = rows[rows[:, 2] < micro_batches]
        return kept


def orders_of(listed: Callable[[int, int, int], Integers]) -> Orders:
    """The orders of lists for a V.

    Args:
        listed: called with (rank, ranks, micro_batches); gives the rank's actions.
    """

    @lru_cache(maxsize=16)
    def order(ranks: int, micro_batches: int) -> Order:
        lists = [listed(rank, ranks, micro_batches) for rank in range(ranks)]
        return execute(lists, 2 * ranks, micro_batches).order

    return order


def v_shaped(name: str, orders: Orders) -> Schedule:
    """The schedule of orders for a V, whose backwards are split."""

    def warm_ups(shape: Shape) -> list[WarmUp]:
        order = orders(shape.ranks, shape.micro_batches)
        return [order.warm_up(shape.stages, shape.micro_batches)]

    return Schedule(
        name,
        lambda shape, _: orders(shape.ranks, shape.micro_batches),
        warm_ups,
        placement=Placement.V_SHAPED,
        stages_per_rank=(2,),
        splits_backward=True,
    )
