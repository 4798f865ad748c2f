"""Decides by reachability over all downsets whether a partition is below a bound.

For each downset, smaller ones first, the fewest devices that reach it are computed. Lower bounds on
the devices for the downset and for the rest decide whether a walk starts there.

A walk goes from a downset to larger ones; the added blocks are the stage. They are added by
ascending index, so every larger downset is visited once, on one path. With each added block, only
terms that involve the block change::

    load = compute
         + values with a user before the stage          they never stop crossing: fixed
         + values without one, of which a user is in the stage and another not yet    may end

so a walk turns back once compute and the fixed part alone exceed the bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers, Words
from pipectl.compiled import compiled
from pipectl.planner.balance.load_model import TOLERANCE, LoadModel, Moves, Stages
from pipectl.planner.graph.downsets import Lattice
from pipectl.planner.request import Expired


@compiled
def has(sets: Words, row: int, block: int) -> bool:
    """Whether a block is in a set."""
    return bool((sets[row, block >> 6] >> np.uint64(block & 63)) & np.uint64(1))


@compiled
def _measure(
    lattice: Lattice, block_s: Floats, moves: Moves, work_s: Floats, cut_s: Floats
) -> None:
    """Compute of every downset, and transfers across its border, from those of a smaller one.

    Args:
        work_s: out; below 0 if not known yet.
        cut_s: out.
    """
    for smaller in range(len(lattice.sets)):
        for arc in range(lattice.larger_at[smaller], lattice.larger_at[smaller + 1]):
            current, block = lattice.larger[arc], lattice.added[arc]
            if work_s[current] >= 0.0:
                continue
            crossing = cut_s[smaller]
            for place in range(moves.values_at[block], moves.values_at[block + 1]):
                value = moves.values[place]
                inside = 0
                for user in range(moves.users_at[value], moves.users_at[value + 1]):
                    inside += has(lattice.sets, current, moves.users[user])
                if inside == 1:
                    crossing += moves.transfer_s[value]
                if inside == moves.users_at[value + 1] - moves.users_at[value]:
                    crossing -= moves.transfer_s[value]
            work_s[current] = work_s[smaller] + block_s[block]
            cut_s[current] = crossing


NEVER = 1 << 30
_STEPS = 1 << 23
"""Steps of a walk between two checks of the time: a third of a second."""


class Limits(NamedTuple):
    """Limits of a stage.

    Args:
        bound_s: loads must be below this.
        limit_bytes: memory of a device.
        compute_s, memory_bytes: of every block.
        cut_s: transfers across the border of every downset.
        allowed: most devices for each downset that leave enough for the rest.
    """

    bound_s: float
    limit_bytes: float
    compute_s: Floats
    memory_bytes: Floats
    cut_s: Floats
    allowed: Integers


class Walk(NamedTuple):
    """State of a walk.

    Args:
        path: by depth: downset, next arc and block; shape [3, depths].
        sums: by depth: compute with fixed transfers, transfers that may end, bytes.
        inside: number of users of every value in the stage; 0 between walks.
        fresh: whether a value has no user before the stage.
    """

    path: Integers
    sums: Floats
    inside: Integers
    fresh: Integers


class Decider:
    """Decides for one model and any bound."""

    def __init__(self, model: LoadModel, devices: int, lattice: Lattice) -> None:
        self._model = model
        self._devices = devices
        self._lattice = lattice
        self._work_s, self._cut_s = np.full(len(lattice.sets), -1.0), np.zeros(len(lattice.sets))
        self._work_s[0] = 0.0
        _measure(lattice, model.compute_s, model.moves, self._work_s, self._cut_s)

    def below(self, bound_s: float, expired: Expired) -> Stages | None:
        """A partition whose loads are all below a bound, or None if there is none.

        Raises:
            TimeoutError: time was up before this was decided.
        """
        model, lattice = self._model, self._lattice
        fewest = np.full(len(lattice.sets), NEVER, dtype=np.int64)
        fewest[0] = 0
        before = np.zeros(len(lattice.sets), dtype=np.int64)
        limits = Limits(
            bound_s,
            model.limit_bytes,
            model.compute_s,
            model.memory_bytes,
            self._cut_s,
            self._allowed(bound_s),
        )
        depths, values = len(model.compute_s) + 1, len(model.moves.transfer_s)
        walk = Walk(
            np.zeros((3, depths), dtype=np.int64),
            np.zeros((depths, 3)),
            *np.zeros((2, values), dtype=np.int64),
        )
        start, full = 0, len(lattice.sets) - 1
        while start < full:
            if expired():
                raise TimeoutError
            start = _reach(lattice, model.moves, limits, fewest, before, walk, start, _STEPS)
        if fewest[full] == NEVER:
            return None
        stages: list[tuple[int, ...]] = []
        end = full
        while end:
            start = int(before[end])
            words = (lattice.sets[end] & ~lattice.sets[start]).astype("<u8")
            inside = np.unpackbits(words.view(np.uint8), bitorder="little")
            stages.append(tuple(np.flatnonzero(inside).tolist()))
            end = start
        return tuple(reversed(stages))

    def _allowed(self, bound_s: float) -> Integers:
        """Most devices for each downset that leave enough for the rest.

        The rest needs devices for its work: at least two if it cannot be a single stage. No walk
        goes on to a downset that needs more devices than this.
        """
        rest_s = self._work_s[-1] - self._work_s
        alone = np.where(rest_s + self._cut_s < bound_s, 1, 2)
        rest = np.maximum(_devices(rest_s, bound_s), alone)
        least = _devices(self._work_s, bound_s)
        allowed = np.where(least + rest <= self._devices, self._devices - rest, -1)
        allowed[-1] = self._devices
        return allowed


def _devices(work_s: Floats, bound_s: float) -> Integers:
    """Lower bound on the devices for some work."""
    return np.ceil(work_s / bound_s * (1 - TOLERANCE)).astype(np.int64)


@compiled
def _add(
    limits: Limits,
    moves: Moves,
    count: Integers,
    fresh: Integers,
    sums: Floats,
    depth: int,
    block: int,
) -> None:
    """Set the sums of a depth: those of the depth before, plus the added block."""
    sums[depth, 0] = sums[depth - 1, 0] + limits.compute_s[block]
    sums[depth, 1] = sums[depth - 1, 1]
    sums[depth, 2] = sums[depth - 1, 2] + limits.memory_bytes[block]
    for place in range(moves.values_at[block], moves.values_at[block + 1]):
        value = moves.values[place]
        count[value] += 1
        if count[value] == 1:
            sums[depth, fresh[value]] += moves.transfer_s[value]
        if fresh[value] == 1 and count[value] == moves.users_at[value + 1] - moves.users_at[value]:
            sums[depth, 1] -= moves.transfer_s[value]


@compiled
def _leave(moves: Moves, count: Integers, block: int) -> None:
    for place in range(moves.values_at[block], moves.values_at[block + 1]):
        count[moves.values[place]] -= 1


@compiled
def _walk(
    lattice: Lattice,
    moves: Moves,
    limits: Limits,
    fewest: Integers,
    before: Integers,
    start: int,
    walk: Walk,
) -> int:
    """Record all stages that start at a downset; returns the number of steps."""
    _, larger_at, larger, added = lattice
    at, arc, blocks = walk.path[0], walk.path[1], walk.path[2]
    sums, count = walk.sums, walk.inside
    needed = fewest[start] + 1
    taken, depth = 0, 0
    at[0], arc[0], blocks[0] = start, larger_at[start], -1
    while depth >= 0:
        here = arc[depth]
        arc[depth] += 1
        if here == larger_at[at[depth] + 1]:
            if depth > 0:
                _leave(moves, count, blocks[depth])
            depth -= 1
            continue
        block = added[here]
        if block < blocks[depth]:
            continue
        taken, depth = taken + 1, depth + 1
        _add(limits, moves, count, walk.fresh, sums, depth, block)
        if sums[depth, 0] >= limits.bound_s or sums[depth, 2] > limits.limit_bytes:
            _leave(moves, count, block)
            depth -= 1
            continue
        end = larger[here]
        below = sums[depth, 0] + sums[depth, 1] < limits.bound_s
        if below and needed < fewest[end] and needed <= limits.allowed[end]:
            fewest[end] = needed
            before[end] = start
        at[depth], arc[depth], blocks[depth] = end, larger_at[end], block
    return taken


@compiled
def _is_dominated(lattice: Lattice, limits: Limits, fewest: Integers, start: int) -> bool:
    """Whether a downset with one block more needs no more devices, and is no worse to go on from.

    Loads are submodular: if removing a block does not raise the load of all remaining blocks, it
    does not raise the load of any later stage.
    """
    for place in range(lattice.larger_at[start], lattice.larger_at[start + 1]):
        larger = lattice.larger[place]
        grown_s = limits.cut_s[larger] - limits.cut_s[start]
        if grown_s <= limits.compute_s[lattice.added[place]] and fewest[larger] <= fewest[start]:
            return True
    return False


@compiled
def _reach(
    lattice: Lattice,
    moves: Moves,
    limits: Limits,
    fewest: Integers,
    before: Integers,
    walk: Walk,
    first: int,
    count: int,
) -> int:
    """Walk from every reached downset, smaller ones first.

    Args:
        fewest: devices by downset; NEVER if it cannot be reached.
        before: downset before the last stage.
        first: downset to begin with.
        count: steps after which to return.

    Returns:
        The downset to go on with; the full one once it is reached or no other is left.
    """
    full, taken, fresh = len(lattice.sets) - 1, 0, walk.fresh
    for start in range(first, full):
        if taken > count:
            return start
        if fewest[start] < NEVER and not _is_dominated(lattice, limits, fewest, start):
            for value in range(len(fresh)):
                fresh[value] = 1
                for place in range(moves.users_at[value], moves.users_at[value + 1]):
                    if has(lattice.sets, start, moves.users[place]):
                        fresh[value] = 0
            taken += _walk(lattice, moves, limits, fewest, before, start, walk)
            if fewest[full] < NEVER:
                break
    return full
