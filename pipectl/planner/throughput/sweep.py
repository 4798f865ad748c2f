"""The decision: is there a plan in which no stage takes more than a given time?

Stages are put together from the end of the pipeline. What matters of the stages behind a state is
the number of their replicas, which sets how many micro-batches the stage in front keeps, and the
number of their devices. Less of either is never worse. So a state has a *front*: the pairs of
replicas and devices of which no other is at most as large in both.

A stage in front, with t devices a replica, takes the smallest number of replicas with which it is
fast enough and fits: any more only make both figures larger. The devices the rest needs at least,
its compute over the given time, cut off what cannot be completed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipectl.arrays import Integers
from pipectl.compiled import compiled
from pipectl.planner.throughput.recomputation import POSSIBLE, UNKNOWN, choose
from pipectl.planner.throughput.spans import Spans
from pipectl.planner.throughput.tables import FIXED, KEPT, SYNC, TIME, Tables

REPLICAS, DEVICES, END, TENSOR, DEGREE, BEHIND = range(6)
"""Columns of a point of a front: replicas and devices from here to the end of the pipeline; end
state, position of t and replicas of the first stage, and the point behind it."""
UNDECIDED, WORK = range(2)
_MOST_WORK = 2_000_000


class Sums(NamedTuple):
    """Figures summed over the blocks of every state.

    Args:
        least, quick: of the smaller figures, and of the ways of least time; shape [states, t, 4].
        missing: blocks that cannot run at t; shape [states, t].
    """

    least: Integers
    quick: Integers
    missing: Integers


class Fronts(NamedTuple):
    """What the sweep found so far.

    Args:
        bounds: where the front of every state begins and ends; shape [states, 2].
        points: shape [any, 6].
        counts: choices of recomputation that were given up, and what was looked at; shape [2].
    """

    bounds: Integers
    points: Integers
    counts: Integers


@compiled
def sweep(
    state: int,
    most_ticks: int,
    tables: Tables,
    spans: Spans,
    sums: Sums,
    ahead: Integers,
    fronts: Fronts,
) -> int:
    """Fill the fronts of the states from ``state`` down, until some work is done.

    Args:
        most_ticks: that a stage may take.
        ahead: devices that each state's own blocks take at least.

    Returns:
        The state to go on with; -1 when all are done. It also stops when ``points`` is short.
    """
    best = np.empty((tables.most_replicas + 1, 6), dtype=np.int64)
    used = fronts.bounds[state + 1, 1]
    fronts.counts[WORK] = 0
    while (
        state >= 0 and fronts.counts[WORK] < _MOST_WORK and used + len(best) <= len(fronts.points)
    ):
        for replicas in range(len(best)):
            best[replicas, DEVICES] = tables.most_devices + 1
        spare = tables.most_devices - ahead[state]
        for span in range(spans.first[state], spans.first[state + 1]):
            for row in range(len(tables.tensor)):
                _extend(state, span, row, spare, most_ticks, tables, spans, sums, fronts, best)
        fronts.bounds[state, 0] = used
        used = _keep(best, tables.most_devices, fronts.points, used)
        fronts.bounds[state, 1] = used
        fronts.counts[WORK] += len(best)
        state -= 1
    return state


@compiled
def _keep(best: Integers, most_devices: int, points: Integers, used: int) -> int:
    """Append the points with fewer devices than all with fewer replicas."""
    least = most_devices + 1
    for replicas in range(len(best)):
        if best[replicas, DEVICES] < least:
            least = best[replicas, DEVICES]
            for column in range(6):
                points[used, column] = best[replicas, column]
            used += 1
    return used


@compiled
def _extend(
    state: int,
    span: int,
    row: int,
    spare: int,
    most_ticks: int,
    tables: Tables,
    spans: Spans,
    sums: Sums,
    fronts: Fronts,
    best: Integers,
) -> None:
    """Put one stage in front of every point of the front it ends at.

    With more replicas behind it a stage needs more memory, so its own do not become fewer.
    """
    end, place = spans.ends[span], 0
    fronts.counts[WORK] += 1
    if sums.missing[end, row] > sums.missing[state, row]:
        return
    least, quick = _figures(sums.least, state, end, row), _figures(sums.quick, state, end, row)
    moved, limit, tensor = spans.moved[span, row], tables.limit_bytes, tables.tensor[row]
    for point in range(fronts.bounds[end, 0], fronts.bounds[end, 1]):
        behind, devices = fronts.points[point, REPLICAS], fronts.points[point, DEVICES]
        while place < len(tables.degrees):
            replicas = tables.degrees[place]
            total = devices + replicas * tensor
            if total > spare or behind + replicas > tables.most_replicas:
                break
            fronts.counts[WORK] += 1
            in_flight = -(-behind // replicas) + 1
            left = most_ticks * replicas - moved
            if _within(least, replicas, in_flight, left, limit) and (
                _within(quick, replicas, in_flight, left, limit)
                or _recompute(state, end, row, replicas, in_flight, left, tables, spans, fronts)
            ):
                _improve(best, behind + replicas, total, end, row, place, point)
                break
            place += 1


@compiled
def _improve(
    best: Integers, replicas: int, devices: int, end: int, row: int, degree: int, behind: int
) -> None:
    """Enter a point where it takes fewer devices than the one that is there."""
    if devices < best[replicas, DEVICES]:
        best[replicas, REPLICAS] = replicas
        best[replicas, DEVICES] = devices
        best[replicas, END] = end
        best[replicas, TENSOR] = row
        best[replicas, DEGREE] = degree
        best[replicas, BEHIND] = behind


@compiled
def _figures(sums: Integers, state: int, end: int, row: int) -> tuple[int, int, int, int]:
    """The figures of the blocks between two states."""
    return (
        sums[end, row, TIME] - sums[state, row, TIME],
        sums[end, row, SYNC] - sums[state, row, SYNC],
        sums[end, row, KEPT] - sums[state, row, KEPT],
        sums[end, row, FIXED] - sums[state, row, FIXED],
    )


@compiled
def _within(
    figures: tuple[int, int, int, int],
    replicas: int,
    in_flight: int,
    time_left: int,
    limit_bytes: int,
) -> bool:
    """Whether blocks with these figures take no more time and memory than that."""
    time, sync, kept, fixed = figures
    return time + sync * (replicas - 1) <= time_left and kept * in_flight + fixed <= limit_bytes


@compiled
def _recompute(
    state: int,
    end: int,
    row: int,
    replicas: int,
    in_flight: int,
    time_left: int,
    tables: Tables,
    spans: Spans,
    fronts: Fronts,
) -> bool:
    """Whether some choice of recomputation makes a stage fast enough and small enough."""
    inside = stage_blocks(spans.rows, state, end)
    fronts.counts[WORK] += 10 * len(inside)
    chosen = np.empty(len(inside), dtype=np.int64)
    found = choose(
        tables.ways[row], inside, replicas, in_flight, time_left, tables.limit_bytes, chosen
    )
    fronts.counts[UNDECIDED] += found == UNKNOWN
    return found == POSSIBLE


@compiled
def stage_blocks(rows: Integers, state: int, end: int) -> Integers:
    """The blocks between two states, ascending."""
    found = np.empty(rows.shape[1], dtype=np.int64)
    count = 0
    for block in range(rows.shape[1]):
        if rows[end, block] > rows[state, block]:
            found[count] = block
            count += 1
    return found[:count]
