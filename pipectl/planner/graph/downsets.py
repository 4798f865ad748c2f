"""Downsets of the block graph: everything a prefix of the stages can be.

A set of blocks is a downset (an ideal) if it holds every predecessor of its members. A pipeline
is a chain of downsets from the empty set to the whole graph, a stage the difference of two of
them. Few downsets are Python integers: bit b is block b; many are rows of 64-bit words. Of small
graphs, all partitions are listed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Integers, Words
from pipectl.planner.graph.blocks import BlockGraph, bits, membership

Partition = tuple[int, ...]
"""Bitset of blocks of every stage, in pipeline order."""
Neighbours = Sequence[Sequence[int]]
"""Predecessors or successors of every block."""


class Lattice(NamedTuple):
    """All downsets, from the empty to the full one, by rising size.

    Args:
        sets: bit b of a row is block b; shape [downsets, words].
        larger_at, larger: for every downset those with one block more, by rising block: those of
            downset d begin at ``larger_at[d]``.
        added: that block, beside ``larger``.
    """

    sets: Words
    larger_at: Integers
    larger: Integers
    added: Integers


def enumerate_downsets(
    before: Neighbours, after: Neighbours, cap: int, expired: Callable[[], bool] = lambda: False
) -> Lattice | None:
    """Every downset, or None if there are more than ``cap`` or time is up.

    Level by level: the downsets of n + 1 blocks are those of n blocks with one block added whose
    predecessors are inside. Equal ones are recognised by keys, sums of a random number per block.

    Args:
        before, after: predecessors and successors of every block.
    """
    blocks = len(before)
    one = np.zeros((blocks, max(1, -(-blocks // 64))), dtype=np.uint64)  # each block alone
    index = np.arange(blocks)
    one[index, index >> 6] = np.uint64(1) << (index & 63).astype(np.uint64)
    needed = np.array([one[list(held)].sum(axis=0) for held in before], dtype=np.uint64)
    count = np.array([len(held) for held in after], dtype=np.int64)
    first_after = np.cumsum([0, *count])[:-1]
    successors = np.array([block for held in after for block in held], dtype=np.int64)
    weight = np.random.default_rng(0).integers(0, 2**64, blocks, dtype=np.uint64)

    sets, keys = np.zeros((1, one.shape[1]), dtype=np.uint64), np.zeros(1, dtype=np.uint64)
    addable = np.array([[not held for held in before]], dtype=np.bool_)
    levels, arcs, total = [sets], [], 1
    while addable.any():
        source, block = np.nonzero(addable)
        larger, key = sets[source] | one[block], keys[source] + weight[block]
        _, first, same = np.unique(key, return_index=True, return_inverse=True)
        number = np.argsort(np.argsort(first))[same]  # in the order in which they are met
        first = np.sort(first)
        if total + len(first) > cap or expired():
            return None
        arcs.append(np.stack([source + (total - len(sets)), block, number + total]))
        addable = addable[source[first]]
        sets, keys = larger[first], key[first]
        assert np.array_equal(larger, sets[number]), "keys of different downsets are equal"
        fresh = block[first]
        rows = np.arange(len(first))
        addable[rows, fresh] = False
        row = np.repeat(rows, count[fresh])
        begin = np.repeat(first_after[fresh] - np.cumsum(count[fresh]) + count[fresh], count[fresh])
        following = successors[begin + np.arange(len(row))]
        opens = ((sets[row] & needed[following]) == needed[following]).all(axis=1)
        addable[row[opens], following[opens]] = True
        levels.append(sets)
        total += len(sets)
    source, added, target = np.concatenate([np.zeros((3, 0), dtype=np.int64), *arcs], axis=1)
    starts = np.searchsorted(source, np.arange(total + 1)).astype(np.int64)
    return Lattice(np.concatenate(levels), starts, target, added)


def all_downsets(graph: BlockGraph, cap: int) -> list[int] | None:
    """Every downset of a graph by rising size, or None if there are more than ``cap``."""
    lattice = enumerate_downsets(*_neighbours(graph), cap)
    if lattice is None:
        return None
    return _by_size(int.from_bytes(row.tobytes(), "little") for row in lattice.sets.astype("<u8"))


def prefix_downsets(graph: BlockGraph, cap: int) -> list[int]:
    """The prefixes of several topological orders by rising size, without duplicates.

    A sample of the downsets. The graph's own order is always among them, others while they fit
    into ``cap``.
    """
    prefixes: set[int] = set()
    for order in topological_orders(*_neighbours(graph)):
        larger, prefix = {*prefixes, 0}, 0
        for block in order:
            prefix |= 1 << block
            larger.add(prefix)
        if prefixes and len(larger) > cap:
            break
        prefixes = larger
    return _by_size(prefixes)


def _by_size(downsets: Iterable[int]) -> list[int]:
    return sorted(downsets, key=lambda downset: (downset.bit_count(), downset))


def _neighbours(graph: BlockGraph) -> tuple[Neighbours, Neighbours]:
    return [list(bits(b)) for b in graph.predecessors], [list(bits(b)) for b in graph.successors]


def topological_orders(before: Neighbours, after: Neighbours) -> list[list[int]]:
    """Orders that always take the ready block of lowest rank.

    Ranked by place, by depth from either end, and depth first; the blocks' own order comes first.
    """
    count = len(before)
    depth, height = [0] * count, [0] * count
    for block in range(count):
        depth[block] = max((depth[b] + 1 for b in before[block]), default=0)
    for block in reversed(range(count)):
        height[block] = max((height[b] + 1 for b in after[block]), default=0)
    latest = [max(held, default=-1) for held in before]
    ranks = [
        [(block, 0) for block in range(count)],
        [(depth[block], block) for block in range(count)],
        [(-height[block], block) for block in range(count)],
        [(-depth[block], block) for block in range(count)],
        [(height[block], block) for block in range(count)],
        [(-latest[block], block) for block in range(count)],
        [(-latest[block], -block) for block in range(count)],
        [(-block, 0) for block in range(count)],
    ]
    orders = []
    for rank in ranks:
        missing = [len(held) for held in before]
        ready = [(rank[block], block) for block, number in enumerate(missing) if not number]
        heapq.heapify(ready)
        order = []
        while ready:
            _, block = heapq.heappop(ready)
            order.append(block)
            for following in after[block]:
                missing[following] -= 1
                if not missing[following]:
                    heapq.heappush(ready, (rank[following], following))
        orders.append(order)
    return orders


class Enumeration:
    """Chains of downsets, each inside the next.

    Args:
        downsets: all there are, the empty one first and the full one last.
    """

    def __init__(self, downsets: Sequence[int]) -> None:
        self._downsets = downsets
        rows = membership(downsets, downsets[-1].bit_length()).astype(np.int64)
        # Entry (i, j): nothing of i is outside of j.
        self._larger = (rows @ (1 - rows).T == 0) & ~np.eye(len(rows), dtype=np.bool_)
        # By number of stages: chains from each downset to the full one.
        self._ways = [np.zeros(len(downsets))]
        self._ways[0][-1] = 1

    def count(self, stages: int) -> float:
        """The number of partitions into so many stages."""
        while len(self._ways) <= stages:
            self._ways.append(self._larger @ self._ways[-1])
        return float(self._ways[stages][0])

    def every_partition(self, stages: int) -> list[Partition]:
        """Every chain from the empty to the full one with so many stages."""
        if not self.count(stages):
            return []
        chains = np.zeros((1, 1), dtype=np.int64)
        for ways in self._ways[stages - 1 :: -1]:
            before, after = np.nonzero(self._larger[chains[:, -1]] & (ways > 0))
            chains = np.column_stack((chains[before], after))
        held = [[self._downsets[state] for state in chain] for chain in chains.tolist()]
        return [tuple(after & ~before for before, after in pairwise(chain)) for chain in held]
