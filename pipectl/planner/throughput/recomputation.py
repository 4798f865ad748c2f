"""Which blocks of a stage to recompute: a knapsack, solved exactly.

Every block starts in the way that takes least time. If that does not fit into memory, blocks are
switched to their other way: each switch gains memory and costs time. Wanted are switches that gain
enough and cost at most what time is left.

In order of rising cost per gain, taking whole switches until the gain suffices is the usual greedy
rule, and taking the last one in part is a lower bound on the cost. Where the time left lies between
the two, depth-first search decides. Of switches with equal gain it takes none that costs more
than one it left out, so equal layers do not make it slow.
"""

from __future__ import annotations

import numpy as np

from pipectl.arrays import Integers
from pipectl.compiled import compiled
from pipectl.planner.throughput.tables import FIXED, KEPT, SYNC, TIME

IMPOSSIBLE, POSSIBLE, UNKNOWN = range(3)
_MOST_STEPS = 20_000
_MARGIN = 1 + 1e-9
"""Lower bounds are rounded numbers: they must exceed the time left by more than that."""


@compiled
def choose(
    ways: Integers,
    inside: Integers,
    replicas: int,
    in_flight: int,
    time_left: int,
    limit_bytes: int,
    chosen: Integers,
) -> int:
    """Pick a way for every block of a stage, so that it is fast enough and fits.

    Args:
        ways: shape [2, 4, blocks]; see :class:`pipectl.planner.throughput.tables.Tables`.
        inside: the stage's blocks.
        time_left: for the blocks, in ticks times replicas.
        chosen: is filled with the column of the way of every block of ``inside``.

    Returns:
        IMPOSSIBLE, POSSIBLE, or UNKNOWN where the search was given up.
    """
    gains = np.empty(len(inside), dtype=np.int64)
    costs = np.empty(len(inside), dtype=np.int64)
    least_time, size = _fastest(ways, inside, replicas, in_flight, chosen, gains, costs)
    if least_time > time_left:
        return IMPOSSIBLE
    if size <= limit_bytes:
        return POSSIBLE
    taken = np.zeros(len(inside), dtype=np.int64)
    found = cover(gains, costs, size - limit_bytes, time_left - least_time, taken)
    if found == POSSIBLE:
        for index in range(len(inside)):
            chosen[index] ^= taken[index]
    return found


@compiled
def _fastest(
    ways: Integers,
    inside: Integers,
    replicas: int,
    in_flight: int,
    chosen: Integers,
    gains: Integers,
    costs: Integers,
) -> tuple[int, int]:
    """Time and bytes of the fastest ways; fills in what the others gain and cost."""
    least_time, size = 0, 0
    for index in range(len(inside)):
        block = inside[index]
        time_0 = ways[0, TIME, block] + ways[0, SYNC, block] * (replicas - 1)
        time_1 = ways[1, TIME, block] + ways[1, SYNC, block] * (replicas - 1)
        size_0 = ways[0, KEPT, block] * in_flight + ways[0, FIXED, block]
        size_1 = ways[1, KEPT, block] * in_flight + ways[1, FIXED, block]
        first = 1 if time_1 < time_0 or (time_1 == time_0 and size_1 < size_0) else 0
        chosen[index] = first
        least_time += min(time_0, time_1)
        size += size_1 if first else size_0
        gains[index] = size_1 - size_0 if first else size_0 - size_1
        costs[index] = abs(time_1 - time_0)
    return least_time, size


@compiled
def cover(gains: Integers, costs: Integers, needed: int, budget: int, taken: Integers) -> int:
    """Take items that gain at least ``needed`` and cost at most ``budget``.

    Args:
        gains: items that gain nothing are never taken.
        costs: at least 0.
        taken: all 0; 1 for what is taken, if the answer is POSSIBLE.
    """
    order = by_ratio(gains, costs)
    gained, spent, place = 0, 0, 0
    while gained < needed:
        if place == len(order):
            return IMPOSSIBLE
        item = order[place]
        if spent + costs[item] * ((needed - gained) / gains[item]) > budget * _MARGIN:
            return IMPOSSIBLE
        taken[item] = 1
        gained += gains[item]
        spent += costs[item]
        place += 1
    while place > 0:
        place -= 1
        item = order[place]
        if gained - gains[item] >= needed:
            taken[item] = 0
            gained -= gains[item]
            spent -= costs[item]
    if spent <= budget:
        return POSSIBLE
    for item in order:
        taken[item] = 0
    return search(gains, costs, order, needed, budget, taken)


@compiled
def by_ratio(gains: Integers, costs: Integers) -> Integers:
    """Items that gain, by rising cost per gain, cost and position (Shell's sort)."""
    order = np.empty(len(gains), dtype=np.int64)
    count = 0
    for item in range(len(gains)):
        if gains[item] > 0:
            order[count] = item
            count += 1
    gap = count // 2
    while gap > 0:
        for start in range(gap, count):
            item = order[start]
            ratio = costs[item] / gains[item]
            place = start
            while place >= gap:
                other = order[place - gap]
                other_ratio = costs[other] / gains[other]
                behind = other_ratio > ratio
                if other_ratio == ratio:
                    behind = costs[other] > costs[item] or (
                        costs[other] == costs[item] and other > item
                    )
                if not behind:
                    break
                order[place] = other
                place -= gap
            order[place] = item
        gap //= 2
    return order[:count]


@compiled
def search(
    gains: Integers, costs: Integers, order: Integers, needed: int, budget: int, taken: Integers
) -> int:
    """Depth-first: take an item, then leave it out and with it all later ones of equal gain."""
    state = np.zeros(len(order) + 1, dtype=np.int64)  # 0 new, 1 taken, 2 left out
    shut = np.zeros(len(order) + 1, dtype=np.int64)
    twin = _twins(gains, order)
    depth, steps = 0, 0
    while depth >= 0:
        item = order[depth] if depth < len(order) else -1
        if state[depth] == 0:
            steps += 1
            if steps > _MOST_STEPS:
                return UNKNOWN
            if _hopeless(gains, costs, order, state, twin, shut, depth, needed, budget):
                depth -= 1
            elif shut[depth] or costs[item] > budget:
                state[depth] = 2
                depth += 1
            else:
                state[depth] = taken[item] = 1
                needed -= gains[item]
                budget -= costs[item]
                if needed <= 0:
                    return POSSIBLE
                depth += 1
        elif state[depth] == 1:
            state[depth] = 2
            taken[item] = 0
            needed += gains[item]
            budget += costs[item]
            depth += 1
        else:
            state[depth] = 0
            depth -= 1
    return IMPOSSIBLE


@compiled
def _twins(gains: Integers, order: Integers) -> Integers:
    """The place of the item before that gains the same; -1 where there is none."""
    twin = np.empty(len(order), dtype=np.int64)
    for place in range(len(order)):
        before = place - 1
        while before >= 0 and gains[order[before]] != gains[order[place]]:
            before -= 1
        twin[place] = before
    return twin


@compiled
def _hopeless(
    gains: Integers,
    costs: Integers,
    order: Integers,
    state: Integers,
    twin: Integers,
    shut: Integers,
    depth: int,
    needed: int,
    budget: int,
) -> bool:
    """Whether even parts of the items from here on cost more than the budget.

    Fills in which of those are shut, because a twin before them was left out.
    """
    spent = 0.0
    for place in range(depth, len(order)):
        before = twin[place]
        shut[place] = before >= 0 and (state[before] == 2 or (before >= depth and shut[before] > 0))
        if not shut[place]:
            item = order[place]
            if gains[item] >= needed:
                return bool(spent + costs[item] * (needed / gains[item]) > budget * _MARGIN)
            needed -= gains[item]
            spent += costs[item]
    return True
