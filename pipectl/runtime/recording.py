"""When a rank began and ended every row that it executed, in columns made beforehand."""

from __future__ import annotations

from array import array
from time import perf_counter

import numpy as np
import numpy.typing as npt

from pipectl.schedule.actions import EVENT_NAMES, Action, Columns

Table = npt.NDArray[np.float64]

WIDTH = 6
"""Columns of a table: start, end, kind (index of ``EVENT_NAMES``), stage, micro-batch, channel."""

_NAMED = [Action._fields.index(name) for name in ("kind", "stage", "micro_batch", "channel")]
_WAIT_FOR_ALL = EVENT_NAMES.index("update_wait")


class Recording:
    """One pass of a rank. What a row is stands in its program; only times are written.

    The times are those of ``perf_counter``.
    """

    def __init__(self) -> None:
        self._rows: list[Columns] = []
        self._times = array("d")
        self._next = 0
        self._met: list[tuple[int, float]] = []

    def expect(self, rows: Columns) -> None:
        """Make room for rows that follow."""
        self._rows.append(rows)
        self._times.frombytes(bytes(2 * self._times.itemsize * len(rows)))

    def add(self, start_s: float, end_s: float) -> None:
        """The next row is over."""
        times, at = self._times, self._next
        times[at] = start_s
        times[at + 1] = end_s
        self._next = at + 2

    def met(self) -> None:
        """The row under way, an UPDATE, has waited for the other ranks until now."""
        self._met.append((self._next // 2, perf_counter()))

    def table(self) -> Table:
        """All rows that are over, in order; shape [events, ``WIDTH``]."""
        count = self._next // 2
        found = np.empty((count, WIDTH))
        found[:, :2] = np.frombuffer(self._times).reshape(-1, 2)[:count]
        if self._rows:
            found[:, 2:] = np.concatenate(self._rows)[:count, _NAMED]
        for more, (row, at_s) in enumerate((row, at_s) for row, at_s in self._met if row < count):
            found = _divided(found, row + more, at_s)
        return found


def _divided(table: Table, row: int, at_s: float) -> Table:
    """The table with a row cut in two: the wait for all other ranks, and what follows it."""
    found = np.insert(table, row, table[row], axis=0)
    found[row, 1:3] = at_s, _WAIT_FOR_ALL
    found[row + 1, 0] = at_s
    return found
