"""Whether any partition is below a bound: reachability over all downsets.

Downsets are enumerated breadth first, so by rising size; each is a row of 64-bit words, with the
ways to make it larger by one block. A downset is reached with the fewest devices. What it takes at
least, and what the rest takes at least, says whether it is worth a walk.

A walk goes from a downset to larger ones. What is added is the stage; blocks are added by rising
index, so every larger downset is met once, by one path. On the way the load changes only by what
touches the block that comes in::

    load = compute
         + values with a user before the stage          they never stop crossing: fixed
         + values without one, of which a user is in the stage and another not yet    may end

so a walk turns back where compute and the fixed part alone exceed the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl.arrays import Floats, Integers, Words
from pipectl.compiled import compiled
from pipectl.planner.balance.load_model import TOLERANCE, LoadModel, Moves, Stages

_ROOM = 1 << 10
_CHUNK = 1 << 12


class Steps(NamedTuple):
    """Downsets, and the way from each to those with one block more.

    Args:
        sets: [downsets, words]; bit b of a row is block b.
        larger_at, larger: for every downset the ones with one block more, by rising block.
        added: that block, beside ``larger``.
    """

    sets: Words
    larger_at: Integers
    larger: Integers
    added: Integers


@dataclass(frozen=True)
class Lattice:
    """Downsets from the empty to the full one.

    Args:
        parents, last_added: of every downset, a smaller one and the block that it lacks.
    """

    steps: Steps
    parents: Integers
    last_added: Integers

    def __len__(self) -> int:
        return len(self.parents)

    def members(self, downset: int) -> set[int]:
        """The blocks of a downset."""
        words = self.steps.sets[downset].astype("<u8")
        inside = np.unpackbits(words.view(np.uint8), bitorder="little")
        return {int(block) for block in np.flatnonzero(inside)}

    def measure(self, model: LoadModel) -> tuple[Floats, Floats]:
        """Compute of every downset, and the transfers across its border."""
        work_s, cut_s = np.zeros(len(self)), np.zeros(len(self))
        parents, added = self.parents, self.last_added
        _measure(self.steps.sets, parents, added, model.compute_s, model.moves, work_s, cut_s)
        return work_s, cut_s


class _Arcs(NamedTuple):
    """Predecessors and successors of every block."""

    before_at: Integers
    before: Integers
    after_at: Integers
    after: Integers


class _Growth(NamedTuple):
    """Downsets while they are enumerated.

    Args:
        sets, addable: [capacity, words] blocks in a downset, and blocks that can be added to it.
        table: hash table of rows, -1 where free; its length is a power of two.
        arcs: [capacity of arcs, 3] (smaller downset, block, larger downset).
        counts: downsets that were extended, downsets found, arcs found.
    """

    sets: Words
    addable: Words
    table: Integers
    arcs: Integers
    counts: Integers


def enumerate_downsets(model: LoadModel, cap: int, expired: Callable[[], bool]) -> Lattice | None:
    """Every downset, or None if there are more than ``cap`` or time is up."""
    before, after = model.predecessors, model.successors
    graph = _Arcs(before.starts, before.items, after.starts, after.items)
    growth = _empty_downset(model)
    while growth.counts[0] < growth.counts[1]:
        if growth.counts[1] > cap or expired():
            return None
        if not _grow(growth, graph, _CHUNK):
            table = np.full(2 * len(growth.table), -1, dtype=np.int64)
            sets, arcs = _doubled(growth.sets), _doubled(growth.arcs)
            _rehash(sets, int(growth.counts[1]), table)
            growth = _Growth(sets, _doubled(growth.addable), table, arcs, growth.counts)
    count = int(growth.counts[1])
    source, block, target = np.ascontiguousarray(growth.arcs[: growth.counts[2]].T)
    starts = np.searchsorted(source, np.arange(count + 1)).astype(np.int64)
    parents, last_added = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    parents[target], last_added[target] = source, block
    return Lattice(Steps(growth.sets[:count], starts, target, block), parents, last_added)


def _empty_downset(model: LoadModel) -> _Growth:
    rows = _ROOM + 2 * len(model)
    sets = np.zeros((rows, (len(model) + 63) // 64), dtype=np.uint64)
    addable = np.zeros_like(sets)
    for block in np.flatnonzero(np.diff(model.predecessors.starts) == 0):
        _flip(addable, 0, int(block))
    table = np.full(4 << rows.bit_length(), -1, dtype=np.int64)
    _rehash(sets, 1, table)
    arcs = np.zeros((8 * rows, 3), dtype=np.int64)
    return _Growth(sets, addable, table, arcs, np.array([0, 1, 0], dtype=np.int64))


def _doubled(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([rows, np.zeros_like(rows)])


@compiled
def has(sets: Words, row: int, block: int) -> bool:
    """Whether a block is in a set."""
    return bool((sets[row, block >> 6] >> np.uint64(block & 63)) & np.uint64(1))


@compiled
def _flip(sets: Words, row: int, block: int) -> None:
    """Add a block to a set that lacks it, or take it out."""
    sets[row, block >> 6] ^= np.uint64(1) << np.uint64(block & 63)


@compiled
def _key(sets: Words, row: int) -> int:
    """A hash of a set (each word through the finaliser of splitmix64)."""
    key = np.uint64(0)
    for word in range(sets.shape[1]):
        key += sets[row, word] + np.uint64(0x9E3779B97F4A7C15)
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        key = key ^ (key >> np.uint64(31))
    return int(key >> np.uint64(1))


@compiled
def _slot_of(sets: Words, row: int, table: Integers) -> int:
    """Where a set stands in the hash table, or the free slot where it belongs."""
    slot = _key(sets, row) & (len(table) - 1)
    while table[slot] >= 0:
        different = 0
        for word in range(sets.shape[1]):
            different += sets[row, word] != sets[table[slot], word]
        if different == 0:
            break
        slot = (slot + 1) & (len(table) - 1)
    return slot


@compiled
def _rehash(sets: Words, found: int, table: Integers) -> None:
    """Enter the first downsets into an empty table."""
    for row in range(found):
        table[_slot_of(sets, row, table)] = row


@compiled
def _extend(growth: _Growth, graph: _Arcs, row: int, block: int) -> None:
    """Enter the downset with one block more, and the arc to it."""
    sets, addable, table, arcs, counts = growth
    new = counts[1]
    sets[new] = sets[row]
    _flip(sets, new, block)
    slot = _slot_of(sets, new, table)
    if table[slot] < 0:
        table[slot] = new
        counts[1] += 1
        addable[new] = addable[row]
        _flip(addable, new, block)
        for place in range(graph.after_at[block], graph.after_at[block + 1]):
            following = graph.after[place]
            ready = True
            for other in range(graph.before_at[following], graph.before_at[following + 1]):
                ready = ready and has(sets, new, graph.before[other])
            if ready:
                _flip(addable, new, following)
    arcs[counts[2], 0] = row
    arcs[counts[2], 1] = block
    arcs[counts[2], 2] = table[slot]
    counts[2] += 1


@compiled
def _grow(growth: _Growth, graph: _Arcs, count: int) -> bool:
    """Extend the next downsets, at most ``count``; whether there was room for all of them."""
    blocks, counts = len(graph.before_at) - 1, growth.counts
    for row in range(counts[0], min(counts[0] + count, counts[1])):
        if counts[1] + blocks >= len(growth.sets) or counts[2] + blocks >= len(growth.arcs):
            return False
        for block in range(blocks):
            if has(growth.addable, row, block):
                _extend(growth, graph, row, block)
        counts[0] = row + 1
    return True


@compiled
def _measure(
    sets: Words,
    parents: Integers,
    added: Integers,
    block_s: Floats,
    moves: Moves,
    work_s: Floats,
    cut_s: Floats,
) -> None:
    """Compute and transfers across the border of every downset, from a smaller one's."""
    for current in range(1, len(sets)):
        block = added[current]
        crossing = cut_s[parents[current]]
        for place in range(moves.values_at[block], moves.values_at[block + 1]):
            value = moves.values[place]
            inside = 0
            for user in range(moves.users_at[value], moves.users_at[value + 1]):
                inside += has(sets, current, moves.users[user])
            if inside == 1:
                crossing += moves.transfer_s[value]
            if inside == moves.users_at[value + 1] - moves.users_at[value]:
                crossing -= moves.transfer_s[value]
        work_s[current] = work_s[parents[current]] + block_s[block]
        cut_s[current] = crossing


NEVER = 1 << 30
_STEPS = 1 << 23
"""Steps of a walk between two looks at the time: a third of a second."""


class Limits(NamedTuple):
    """What a stage may be.

    Args:
        bound_s: loads must be below.
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


class Decider:
    """Answers for one model and any bound."""

    def __init__(self, model: LoadModel, devices: int, lattice: Lattice) -> None:
        self._model = model
        self._devices = devices
        self._lattice = lattice
        self._work_s, self._cut_s = lattice.measure(model)

    def below(self, bound_s: float, expired: Callable[[], bool]) -> Stages | None:
        """Some partition whose stages are all below a bound, or None if there is none.

        Raises:
            TimeoutError: time was up before this was known.
        """
        model, lattice = self._model, self._lattice
        fewest = np.full(len(lattice), NEVER, dtype=np.int64)
        fewest[0] = 0
        before = np.zeros(len(lattice), dtype=np.int64)
        limits = Limits(
            bound_s,
            model.limit_bytes,
            model.compute_s,
            model.memory_bytes,
            self._cut_s,
            self._allowed(bound_s),
        )
        start, full = 0, len(lattice) - 1
        while start < full:
            if expired():
                raise TimeoutError
            start = _reach(lattice.steps, model.moves, limits, fewest, before, start, _STEPS)
        if fewest[full] == NEVER:
            return None
        stages: list[tuple[int, ...]] = []
        end = full
        while end:
            start = int(before[end])
            stages.append(tuple(sorted(lattice.members(end) - lattice.members(start))))
            end = start
        return tuple(reversed(stages))

    def _allowed(self, bound_s: float) -> Integers:
        """Most devices for each downset that leave enough for the rest.

        The rest needs devices for its work, two if it is no stage by itself. Where more are needed
        for the downset than are left, no walk need go on.
        """
        rest_s = self._work_s[-1] - self._work_s
        alone = np.where(rest_s + self._cut_s < bound_s, 1, 2)
        rest = np.maximum(_devices(rest_s, bound_s), alone)
        least = _devices(self._work_s, bound_s)
        allowed = np.where(least + rest <= self._devices, self._devices - rest, -1)
        allowed[-1] = self._devices
        return allowed


def _devices(work_s: Floats, bound_s: float) -> Integers:
    """How many take some work at least."""
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
    """The sums of a depth: those of the one before, and what a block that comes in adds."""
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
    steps: Steps,
    moves: Moves,
    limits: Limits,
    fewest: Integers,
    before: Integers,
    start: int,
    fresh: Integers,
) -> int:
    """Note all stages that start at a downset; returns the steps it took.

    By depth: downset, next arc, block and three sums: compute with fixed transfers, transfers that
    may end, bytes.
    """
    _, larger_at, larger, added = steps
    at, arc, blocks = np.zeros((3, len(limits.compute_s) + 1), dtype=np.int64)
    sums = np.zeros((len(limits.compute_s) + 1, 3))
    count = np.zeros(len(moves.transfer_s), dtype=np.int64)
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
        _add(limits, moves, count, fresh, sums, depth, block)
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
def _is_dominated(steps: Steps, limits: Limits, fewest: Integers, start: int) -> bool:
    """Whether a downset with one block more is reached with as little, and no worse to go on from.

    Loads are submodular: a block without which the load of all that remains is no larger, adds to
    every later stage that holds it, so the same stages without it are none the worse.
    """
    for place in range(steps.larger_at[start], steps.larger_at[start + 1]):
        larger = steps.larger[place]
        grown_s = limits.cut_s[larger] - limits.cut_s[start]
        if grown_s <= limits.compute_s[steps.added[place]] and fewest[larger] <= fewest[start]:
            return True
    return False


@compiled
def _reach(
    steps: Steps,
    moves: Moves,
    limits: Limits,
    fewest: Integers,
    before: Integers,
    first: int,
    count: int,
) -> int:
    """Walk from every downset that is reached, smaller ones first.

    Args:
        fewest: devices by downset; NEVER where there is no way.
        before: downset before the last stage.
        first: downset to begin with.
        count: steps after which to return.

    Returns:
        The downset to go on with; the full one once all is done, or once that is reached.
    """
    full, taken = len(steps.sets) - 1, 0
    fresh = np.zeros(len(moves.transfer_s), dtype=np.int64)
    for start in range(first, full):
        if taken > count:
            return start
        if fewest[start] < NEVER and not _is_dominated(steps, limits, fewest, start):
            for value in range(len(fresh)):
                fresh[value] = 1
                for place in range(moves.users_at[value], moves.users_at[value + 1]):
                    if has(steps.sets, start, moves.users[place]):
                        fresh[value] = 0
            taken += _walk(steps, moves, limits, fewest, before, start, fresh)
            if fewest[full] < NEVER:
                break
    return full
