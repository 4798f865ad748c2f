"""Execution of lists of actions without time for messages (compiled)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipectl.compiled import compiled

FORWARD, BACKWARD, WEIGHT = range(3)
"""As in :mod:`pipectl.schedule.sequences`."""
Table = npt.NDArray[np.int64]


@compiled
def run(
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
