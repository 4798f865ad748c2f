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

import numpy as np
import numpy.typing as npt

from pipectl.errors import ScheduleError
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
_NAMES = ("forward", "backward", "weight half of the backward")
_PART = np.full(len(Kind), -1, dtype=np.int64)
_PART[[Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT]] = FORWARD, BACKWARD, BACKWARD
_PART[Kind.BACKWARD_WEIGHT] = WEIGHT


def order_of_sequences(sequences: Sequence[Integers], stages: int, micro_batches: int) -> Order:
    """The order in which every rank computes what its list says.

    Args:
        sequences: of every rank: kind, stage and micro-batch of its actions; shape [actions, 3].
            Backwards are all whole, or all in halves.

    Raises:
        ScheduleError: an action is missing or there twice, or ranks wait for each other.
    """
    from pipectl.schedule.sequences_kernel import run  # a compiler: only lists need it

    rows = np.concatenate(sequences).astype(np.int64)
    splits = bool((rows[:, 0] == Kind.BACKWARD_INPUT).any())
    duration = np.where(rows[:, 0] == Kind.BACKWARD, 2, 1)
    rows[:, 0] = _PART[rows[:, 0]]
    _check_complete(rows, stages, micro_batches, splits=splits)
    ends = np.cumsum([len(sequence) for sequence in sequences])
    over_at = np.full((len(_NAMES), stages, micro_batches), -1, dtype=np.int64)
    turns, position = over_at.copy(), np.concatenate([[0], ends[:-1]])
    run(rows, duration, position, ends, over_at, turns)
    if np.any(position < ends):
        raise _stuck(rows, position, ends)
    weight = _looked_up(turns[WEIGHT]) if splits else None
    return Order(_looked_up(turns[FORWARD]), _looked_up(turns[BACKWARD]), weight)


def _looked_up(table: Table) -> Turns:
    def turns(stage: int, micro_batches: Integers) -> Integers:
        found: Integers = table[stage, micro_batches]
        return found

    return turns


def _check_complete(rows: Table, stages: int, micro_batches: int, *, splits: bool) -> None:
    """Every part of every micro-batch in every stage is there once, and nothing else."""
    shape = WEIGHT + 1, stages, micro_batches
    if np.any(rows < 0) or np.any(rows >= shape):
        raise _fault("an action of a kind, stage or micro-batch that the step does not have")
    counts = np.zeros(shape, dtype=np.int64)
    np.add.at(counts, tuple(rows.T), 1)
    counts = counts if splits else counts[:WEIGHT]
    if np.any(counts != 1):
        part, stage, index = np.argwhere(counts != 1)[0].tolist()
        often = int(counts[part, stage, index])
        raise _fault(
            f"the {_NAMES[part]} of micro-batch {index} in stage {stage} is there {often} times"
        )


def _stuck(rows: Table, position: Table, ends: Table) -> ScheduleError:
    ranks = np.flatnonzero(position < ends)[:4].tolist()
    waits = []
    for rank in ranks:
        part, stage, index = rows[position[rank]].tolist()
        waits.append(
            f"rank {rank} cannot begin the {_NAMES[part]} of micro-batch {index} in stage {stage}"
        )
    return _fault("ranks wait for each other: " + "; ".join(waits))


def _fault(message: str) -> ScheduleError:
    return ScheduleError(
        f"schedule: {message}",
        cure="list every action once, after all that it depends on",
    )


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
        found: Integers = rows[rows[:, 2] < micro_batches]
        return found


def orders_of(listed: Callable[[int, int, int], Integers]) -> Orders:
    """The orders of lists for a V.

    Args:
        listed: called with (rank, ranks, micro_batches); gives the rank's actions.
    """

    @lru_cache(maxsize=16)
    def order(ranks: int, micro_batches: int) -> Order:
        lists = [listed(rank, ranks, micro_batches) for rank in range(ranks)]
        return order_of_sequences(lists, 2 * ranks, micro_batches)

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
