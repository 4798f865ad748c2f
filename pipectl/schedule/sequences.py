"""Orders of schedules that are lists of the computations of every rank.

The turn of an action is the time at which it would start if messages took no time, a forward and
each half of a backward one unit, and a whole backward two units. Lists that can run give a sound
order; ranks that wait for each other are detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl.schedule.actions import Integers, Kind
from pipectl.schedule.order import Order, Turns

Table = npt.NDArray[np.int64]
FORWARD, BACKWARD, WEIGHT = range(3)
"""Parts of a micro-batch in a stage; ``BACKWARD`` is a whole backward or its input half."""
PART = np.full(len(Kind), -1, dtype=np.int64)
PART[[Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT]] = FORWARD, BACKWARD, BACKWARD
PART[Kind.BACKWARD_WEIGHT] = WEIGHT


class Execution(NamedTuple):
    """How far lists can be executed.

    Args:
        order: order of the executed actions.
        position: index of each rank's first action that was not executed.
        is_done: whether each part was executed; shape [parts, stages, micro-batches].
    """

    order: Order
    position: Table
    is_done: npt.NDArray[np.bool_]


def execute(sequences: Sequence[Integers], stages: int, micro_batches: int) -> Execution:
    """Execute the list of every rank, for a chain of stages.

    Args:
        sequences: kind, stage and micro-batch of each rank's actions; shape [actions, 3] per rank.
            Backwards are all whole or all split, and complete.
    """
    from pipectl.schedule.sequences_kernel import run  # imports LLVM; only lists need it

    rows = np.concatenate(sequences).astype(np.int64)
    splits = bool((rows[:, 0] == Kind.BACKWARD_INPUT).any())
    duration = np.where(rows[:, 0] == Kind.BACKWARD, 2, 1)
    rows[:, 0] = PART[rows[:, 0]]
    ends = np.cumsum([len(sequence) for sequence in sequences])
    over_at = np.full((WEIGHT + 1, stages, micro_batches), -1, dtype=np.int64)
    first = np.concatenate([[0], ends[:-1]])
    turns, position = over_at.copy(), first.copy()
    run(rows, duration, position, ends, np.zeros_like(ends), over_at, turns)
    weight = _turns_in(turns[WEIGHT]) if splits else None
    order = Order(_turns_in(turns[FORWARD]), _turns_in(turns[BACKWARD]), weight)
    return Execution(order, position - first, over_at >= 0)


def _turns_in(table: Table) -> Turns:
    def turns(stage: int, micro_batches: Integers) -> Integers:
        looked_up: Integers = table[stage, micro_batches]
        return looked_up

    return turns
