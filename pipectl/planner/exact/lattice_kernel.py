"""Kernels that enumerate downsets. See :mod:`pipectl.planner.exact.lattice`."""

from __future__ import annotations

import numpy as np

from pipectl.arrays import Floats, Integers, Words
from pipectl.compiled import compiled
from pipectl.planner.exact.arrays import Arcs, Growth, Moves


@compiled
def has(sets: Words, row: int, block: int) -> bool:
    """Whether a block is in a set."""
    return bool((sets[row, block >> 6] >> np.uint64(block & 63)) & np.uint64(1))


@compiled
def flip(sets: Words, row: int, block: int) -> None:
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
def _equal(sets: Words, row: int, other: int) -> bool:
    different = 0
    for word in range(sets.shape[1]):
        different += sets[row, word] != sets[other, word]
    return different == 0


@compiled
def _slot_of(sets: Words, row: int, table: Integers) -> int:
    """Where a set stands in the hash table, or the free slot where it belongs."""
    slot = _key(sets, row) & (len(table) - 1)
    while table[slot] >= 0 and not _equal(sets, row, table[slot]):
        slot = (slot + 1) & (len(table) - 1)
    return slot


@compiled
def rehash(sets: Words, found: int, table: Integers) -> None:
    """Enter the first downsets into an empty table."""
    for row in range(found):
        table[_slot_of(sets, row, table)] = row


@compiled
def _open(graph: Arcs, sets: Words, addable: Words, row: int, block: int) -> None:
    """Note what can be added to a downset since it has a block."""
    flip(addable, row, block)
    for place in range(graph.after_at[block], graph.after_at[block + 1]):
        following = graph.after[place]
        ready = True
        for other in range(graph.before_at[following], graph.before_at[following + 1]):
            ready = ready and has(sets, row, graph.before[other])
        if ready:
            flip(addable, row, following)


@compiled
def _extend(growth: Growth, graph: Arcs, row: int, block: int) -> None:
    """Enter the downset with one block more, and the arc to it."""
    sets, addable, table, arcs, counts = growth
    new = counts[1]
    sets[new] = sets[row]
    flip(sets, new, block)
    slot = _slot_of(sets, new, table)
    if table[slot] < 0:
        table[slot] = new
        counts[1] += 1
        addable[new] = addable[row]
        _open(graph, sets, addable, new, block)
    arcs[counts[2], 0] = row
    arcs[counts[2], 1] = block
    arcs[counts[2], 2] = table[slot]
    counts[2] += 1


@compiled
def grow(growth: Growth, graph: Arcs, most: int) -> bool:
    """Extend the next downsets, ``most`` at most; say whether there was room for all of them."""
    blocks, counts = len(graph.before_at) - 1, growth.counts
    for row in range(counts[0], min(counts[0] + most, counts[1])):
        if counts[1] + blocks >= len(growth.sets) or counts[2] + blocks >= len(growth.arcs):
            return False
        for block in range(blocks):
            if has(growth.addable, row, block):
                _extend(growth, graph, row, block)
        counts[0] = row + 1
    return True


@compiled
def measure(
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
