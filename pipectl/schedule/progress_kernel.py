"""Executes the transfers of all ranks without time. Compiled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipectl.compiled import compiled

Table = npt.NDArray[np.int64]


@compiled
def run(
    rows: Table, position: Table, ends: Table, started: Table, first_sum: int, reducers: Table
) -> None:
    """Go on with every rank until it waits for what has not started; moves ``position``.

    Args:
        rows: of all ranks: the number of what a row starts, or ``~`` of what it waits for.
        position, ends: of every rank, its next row and the one behind its last.
        started: of every number, how often it was started.
        first_sum: numbers from here on are started by several ranks.
        reducers: how many these are.
    """
    ranks = len(ends)
    able = np.arange(ranks)
    waiting = np.full(len(started), -1, np.int32)
    following = np.full(ranks, -1, np.int64)
    count = ranks
    while count:
        count -= 1
        rank = able[count]
        while position[rank] < ends[rank]:
            number = rows[position[rank]]
            if number < 0:
                number = ~number
                wanted = 1 if number < first_sum else reducers[number - first_sum]
                if started[number] < wanted:
                    following[rank] = waiting[number]
                    waiting[number] = rank
                    break
            else:
                started[number] += 1
                wanted = 1 if number < first_sum else reducers[number - first_sum]
                if started[number] == wanted:
                    other = np.int64(waiting[number])
                    waiting[number] = -1
                    while other >= 0:
                        able[count] = other
                        count += 1
                        other = following[other]
            position[rank] += 1
