"""Kernels of the decision: which downsets can be the end of a stage below a bound.

A walk goes from a downset to larger ones. What is added is the stage; blocks are added by rising
index, so every larger downset is met once, by one path. On the way the load changes only by what
touches the block that comes in::

    load = compute
         + values with a user in front of the stage     they never stop crossing: fixed
         + values without one, of which a user is in the stage and another not yet    may end

so a walk turns back where compute and the fixed part alone exceed the bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled
from pipectl.planner.exact.arrays import Moves, Steps
from pipectl.planner.exact.lattice_kernel import has

NEVER = 1 << 30


class Limits(NamedTuple):
    """What a stage may be.

    Args:
        bound_s: loads must be below.
        bytes_: most memory of an accelerator.
        costs: [blocks, 3] seconds on an accelerator and on a CPU, bytes.
        cut_s: transfers across the border of every downset.
        allowed: [downsets, CPUs + 1] most accelerators in front of the rest.
    """

    bound_s: float
    bytes_: float
    costs: Floats
    cut_s: Floats
    allowed: Integers


class Reached(NamedTuple):
    """How downsets are filled.

    Args:
        fewest: [downsets, CPUs + 1] accelerators; NEVER where there is no way.
        before: downset in front of the last stage, or -1 less it if that is on a CPU.
    """

    fewest: Integers
    before: Integers


@compiled
def _add(
    costs: Floats,
    transfer_s: Floats,
    users_at: Integers,
    values_at: Integers,
    values: Integers,
    count: Integers,
    fresh: Integers,
    sums: Floats,
    depth: int,
    block: int,
) -> None:
    """The sums of a depth: those of the one before, and what a block that comes in adds."""
    sums[depth, 0] = sums[depth - 1, 0] + costs[block, 0]
    sums[depth, 1] = sums[depth - 1, 1]
    sums[depth, 2] = sums[depth - 1, 2] + costs[block, 1]
    sums[depth, 3] = sums[depth - 1, 3] + costs[block, 2]
    for place in range(values_at[block], values_at[block + 1]):
        value = values[place]
        count[value] += 1
        if count[value] == 1:
            sums[depth, fresh[value]] += transfer_s[value]
        if fresh[value] == 1 and count[value] == users_at[value + 1] - users_at[value]:
            sums[depth, 1] -= transfer_s[value]


@compiled
def _leave(values_at: Integers, values: Integers, count: Integers, block: int) -> None:
    for place in range(values_at[block], values_at[block + 1]):
        count[values[place]] -= 1


@compiled
def _note(
    fewest: Integers,
    before: Integers,
    allowed: Integers,
    start: int,
    end: int,
    on_accelerator: bool,
    on_cpu: bool,
) -> None:
    """Enter a stage on the devices that it is possible on."""
    if on_accelerator:
        _enter_stage(fewest, before, allowed, start, end, 1)
    if on_cpu:
        _enter_stage(fewest, before, allowed, start, end, 0)


@compiled
def _enter_stage(
    fewest: Integers, before: Integers, allowed: Integers, start: int, end: int, accelerators: int
) -> None:
    """Enter a stage if it fills its end with fewer accelerators, and few enough for the rest.

    Args:
        accelerators: 1, or 0 for a stage on a CPU.
    """
    for cpus in range(fewest.shape[1] - 1 + accelerators):
        needed, after = fewest[start, cpus] + accelerators, cpus + 1 - accelerators
        if needed < fewest[end, after] and needed <= allowed[end, after]:
            fewest[end, after] = needed
            before[end, after] = start if accelerators == 1 else -1 - start


@compiled
def _look_around(steps: Steps, moves: Moves, start: int, fresh: Integers) -> None:
    """Mark the values of which no user is in front of a stage."""
    for value in range(len(fresh)):
        fresh[value] = 1
        for place in range(moves.users_at[value], moves.users_at[value + 1]):
            if has(steps.sets, start, moves.users[place]):
                fresh[value] = 0


@compiled
def _walk(
    steps: Steps, moves: Moves, limits: Limits, reached: Reached, start: int, fresh: Integers
) -> int:
    """Note all stages that start at a downset; returns the steps it took.

    By depth: downset, next arc, block and four sums: compute with fixed transfers, transfers that
    may end, CPU seconds, bytes.
    """
    _, larger_at, larger, added = steps
    transfer_s, users_at, _, values_at, values = moves
    bound_s, most_bytes, costs, _, allowed = limits
    fewest, before = reached
    at, arc, blocks = np.zeros((3, len(costs) + 1), dtype=np.int64)
    sums = np.zeros((len(costs) + 1, 4))
    count = np.zeros(len(transfer_s), dtype=np.int64)
    taken, depth = 0, 0
    at[0], arc[0], blocks[0] = start, larger_at[start], -1
    while depth >= 0:
        here = arc[depth]
        arc[depth] += 1
        if here == larger_at[at[depth] + 1]:
            if depth > 0:
                _leave(values_at, values, count, blocks[depth])
            depth -= 1
            continue
        block = added[here]
        if block < blocks[depth]:
            continue
        taken, depth = taken + 1, depth + 1
        _add(costs, transfer_s, users_at, values_at, values, count, fresh, sums, depth, block)
        possible = sums[depth, 0] < bound_s and sums[depth, 3] <= most_bytes
        on_cpu = sums[depth, 2] < bound_s
        alone = possible and sums[depth, 0] + sums[depth, 1] < bound_s
        _note(fewest, before, allowed, start, larger[here], alone, on_cpu)
        if possible or on_cpu:
            at[depth], arc[depth], blocks[depth] = larger[here], larger_at[larger[here]], block
        else:
            _leave(values_at, values, count, block)
            depth -= 1
    return taken


@compiled
def _dominated(steps: Steps, limits: Limits, fewest: Integers, start: int) -> bool:
    """Whether a downset with one block more is reached with as little, and no worse to go on from.

    Loads are submodular: a block without which the load of all that remains is no larger, adds to
    every later stage that holds it, so the same stages without it are none the worse.
    """
    for place in range(steps.larger_at[start], steps.larger_at[start + 1]):
        larger = steps.larger[place]
        grown_s = limits.cut_s[larger] - limits.cut_s[start]
        if grown_s <= limits.costs[steps.added[place], 0]:
            worse = 0
            for cpus in range(fewest.shape[1]):
                worse += fewest[larger, cpus] > fewest[start, cpus]
            if worse == 0:
                return True
    return False


@compiled
def reach(
    steps: Steps, moves: Moves, limits: Limits, reached: Reached, first: int, most: int
) -> int:
    """Walk from every downset that is reached, smaller ones first.

    Args:
        first: downset to begin with.
        most: steps after which to return.

    Returns:
        The downset to go on with; the full one once all is done, or once that is reached.
    """
    full, taken = len(steps.sets) - 1, 0
    fresh = np.zeros(len(moves.transfer_s), dtype=np.int64)
    for start in range(first, full):
        if taken > most:
            return start
        if reached.fewest[start].min() < NEVER and not _dominated(
            steps, limits, reached.fewest, start
        ):
            _look_around(steps, moves, start, fresh)
            taken += _walk(steps, moves, limits, reached, start, fresh)
            if reached.fewest[full].min() < NEVER:
                break
    return full
