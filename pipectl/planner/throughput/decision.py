"""From a time to the stages that keep it, or the certainty that there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipectl.arrays import Integers
from pipectl.planner.throughput.recomputation import POSSIBLE, choose
from pipectl.planner.throughput.spans import spans_of
from pipectl.planner.throughput.sweep import (
    BEHIND,
    DEGREE,
    END,
    REPLICAS,
    TENSOR,
    UNDECIDED,
    Fronts,
    Sums,
    sweep,
)
from pipectl.planner.throughput.tables import FIXED, KEPT, SYNC, TIME, Borders, Tables


@dataclass(frozen=True)
class Cut:
    """A stage of an answer.

    Args:
        blocks: its blocks, ascending.
        columns: 0 or 1 for each of them: which of its ways it runs.
        row: position of its tensor-parallel degree.
        replicas: how many it has.
        in_flight: micro-batches each of them holds.
        ticks: it takes no more.
        size_bytes: memory of each device.
    """

    blocks: tuple[int, ...]
    columns: tuple[int, ...]
    row: int
    replicas: int
    in_flight: int
    ticks: int
    size_bytes: int


@dataclass(frozen=True)
class Answer:
    """Whether a time can be kept.

    Args:
        cuts: the stages that keep it with the fewest devices; None if there are none.
        proven: whether there are certainly none, if ``cuts`` is None.
    """

    cuts: tuple[Cut, ...] | None
    proven: bool


class Decision:
    """The decision for one workload and any time.

    Args:
        downsets: by rising size, the empty one first and the full one last.
    """

    def __init__(self, downsets: Sequence[int], tables: Tables, borders: Borders) -> None:
        blocks = tables.quick.shape[1]
        self.tables = tables
        self.spans = spans_of(downsets, blocks, borders)
        self.sums = _sums(self.spans.rows, tables)
        self._work = self.spans.rows @ _device_ticks(tables)
        self._fronts = _empty_fronts(len(downsets), tables.most_replicas)

    @property
    def least_ticks(self) -> int:
        """No plan takes less: the work spread evenly over all devices."""
        return -(-int(self._work[-1]) // self.tables.most_devices)

    def ask(self, most_ticks: int, expired: Callable[[], bool]) -> Answer | None:
        """The answer for a time; None if the search was stopped."""
        states = len(self.spans.rows)
        ahead = -(-self._work // max(1, most_ticks))
        fronts = self._fronts
        fronts.counts[UNDECIDED] = 0
        state = states - 2
        while state >= 0:
            if expired():
                return None
            state = sweep(state, most_ticks, self.tables, self.spans, self.sums, ahead, fronts)
            if fronts.bounds[state + 1, 1] + self.tables.most_replicas >= len(fronts.points):
                fronts = fronts._replace(points=np.concatenate([fronts.points] * 2))
        self._fronts = fronts
        first, beyond = fronts.bounds[0]
        if first == beyond:
            return Answer(None, proven=not fronts.counts[UNDECIDED])
        return Answer(self._cuts(int(beyond) - 1, most_ticks), proven=True)

    def _cuts(self, point: int, most_ticks: int) -> tuple[Cut, ...]:
        """The stages from a point of the front of the empty state."""
        state, found = 0, []
        while state < len(self.spans.rows) - 1:
            entry = self._fronts.points[point]
            found.append(self._cut(state, entry, most_ticks))
            state, point = int(entry[END]), int(entry[BEHIND])
        return tuple(found)

    def _cut(self, start: int, entry: Integers, most_ticks: int) -> Cut:
        """The stage that a point of a front stands for."""
        end, row = int(entry[END]), int(entry[TENSOR])
        replicas = int(self.tables.degrees[entry[DEGREE]])
        in_flight = -(-int(entry[REPLICAS]) // replicas)
        moved = int(self.spans.moved[self._span(start, end), row])
        inside = np.flatnonzero(self.spans.rows[end] > self.spans.rows[start])
        columns = self.tables.quick[row, inside]
        chosen = columns.copy()
        time_left = most_ticks * replicas - moved
        limit = self.tables.limit_bytes
        ways = self.tables.ways[row]
        if choose(ways, inside, replicas, in_flight, time_left, limit, chosen) == POSSIBLE:
            columns = chosen
        figures = ways[columns, :, inside].sum(axis=0)
        work = moved + int(figures[TIME] + figures[SYNC] * (replicas - 1))
        return Cut(
            blocks=tuple(inside.tolist()),
            columns=tuple(columns.tolist()),
            row=row,
            replicas=replicas,
            in_flight=in_flight,
            ticks=-(-work // replicas),
            size_bytes=int(figures[KEPT] * in_flight + figures[FIXED]),
        )

    def _span(self, start: int, end: int) -> int:
        first, beyond = self.spans.first[start], self.spans.first[start + 1]
        return int(first + np.searchsorted(self.spans.ends[first:beyond], end))


def _sums(rows: Integers, tables: Tables) -> Sums:
    """Figures of the blocks of every state; shape [states, t, …]."""
    quick = np.take_along_axis(tables.ways, tables.quick[:, None, None, :], axis=1)[:, 0]
    return Sums(
        least=np.ascontiguousarray(np.moveaxis(tables.least @ rows.T, 2, 0)),
        quick=np.ascontiguousarray(np.moveaxis(quick @ rows.T, 2, 0)),
        missing=np.ascontiguousarray((tables.missing @ rows.T).T),
    )


def _device_ticks(tables: Tables) -> Integers:
    """Ticks of every block times devices, in the way in which that is least."""
    ticks = tables.least[:, TIME] * tables.tensor[:, None]
    found: Integers = np.where(tables.missing, np.iinfo(np.int64).max, ticks).min(axis=0)
    return found


def _empty_fronts(states: int, most_replicas: int) -> Fronts:
    """The front of the full state is the end of the pipeline: nothing behind it."""
    bounds = np.zeros((states, 2), dtype=np.int64)
    bounds[-1, 1] = 1
    points = np.zeros((4 * most_replicas + 4096, 6), dtype=np.int64)
    return Fronts(bounds, points, np.zeros(2, dtype=np.int64))
