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

from pipectl.compiled import compiled, run_small
from pipectl.schedule.actions import Integers, Kind
from pipectl.schedule.order import Order, Turns

Table = npt.NDArray[np.int64]
FORWARD, BACKWARD, WEIGHT = range(3)
"""Parts of a micro-batch in a stage; ``BACKWARD`` is a whole backward or its input half."""
PART = np.full(len(Kind), -1, dtype=np.int64)
PART[[Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT]] = FORWARD, BACKWARD, BACKWARD
PART[Kind.BACKWARD_WEIGHT] = WEIGHT

_MAX_SMALL = 20_000
"""Actions that Python executes in the time in which LLVM is loaded, which ranks do not need."""


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
    rows = np.concatenate(sequences).astype(np.int64)
    splits = bool((rows[:, 0] == Kind.BACKWARD_INPUT).any())
    duration = np.where(rows[:, 0] == Kind.BACKWARD, 2, 1)
    rows[:, 0] = PART[rows[:, 0]]
    ends = np.cumsum([len(sequence) for sequence in sequences])
    over_at = np.full((WEIGHT + 1, stages, micro_batches), -1, dtype=np.int64)
    first = np.concatenate([[0], ends[:-1]])
    turns, position = over_at.copy(), first.copy()
    arguments = rows, duration, position, ends, np.zeros_like(ends), over_at, turns
    if len(rows) > _MAX_SMALL:
        _run(*arguments)
    else:
        run_small(_run, *arguments)
    weight = _turns_in(turns[WEIGHT]) if splits else None
    order = Order(_turns_in(turns[FORWARD]), _turns_in(turns[BACKWARD]), weight)
    return Execution(order, position - first, over_at >= 0)


def _turns_in(table: Table) -> Turns:
    def turns(stage: int, micro_batches: Integers) -> Integers:
        looked_up: Integers = table[stage, micro_batches]
        return looked_up

    return turns


@compiled
def _run(
    rows: Table,
    duration: Table,
    position: Table,
    ends: Table,
    clock: Table,
    over_at: Table,
    turns: Table,
) -> None:
    """Start every action when its rank and its dependencies are ready; fills ``turns``.

    Args:
        clock: zeros, one per rank.
        position: next row of each rank.
        over_at: end of each part; below 0 if it was not executed.
    """
    moved = True
    while moved:
        moved = False
        for rank in range(len(ends)):
            while position[rank] < ends[rank]:
                row = position[rank]
                part, stage, index = rows[row]
                ready = _ready_at(over_at, part, stage, index)
                if ready < 0:
                    break
                start = max(clock[rank], ready)
                turns[part, stage, index] = start
                clock[rank] = over_at[part, stage, index] = start + duration[row]
                position[rank] += 1
                moved = True


@compiled
def _ready_at(over_at: Table, part: int, stage: int, index: int) -> int:
    """Return when all dependencies of an action are over; below 0 if unknown."""
    if part == FORWARD:
        return 0 if stage == 0 else int(over_at[FORWARD, stage - 1, index])
    if part == WEIGHT:
        return int(over_at[BACKWARD, stage, index])
    made = over_at[FORWARD, stage, index]
    if stage == over_at.shape[1] - 1 or made < 0:
        return int(made)
    later = over_at[BACKWARD, stage + 1, index]
    return int(later if later < 0 else max(made, later))
