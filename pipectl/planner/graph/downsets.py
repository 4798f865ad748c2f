"""Downsets of the block graph: the sets of blocks that the first stages can hold.

A set of blocks is a downset (an ideal) if it holds every predecessor of its members. A pipeline
is a chain of downsets from the empty set to the whole graph; a stage is the difference of two
neighbours in the chain. A single downset is a Python integer (bit b is block b); many downsets are
rows of 64-bit words. If the graph is small, all partitions are listed.

If there are too many downsets to search, blocks that cost next to nothing are merged first. A
block without edges doubles the number of downsets, and models have many such operators: counters of
batch norms, shapes, masks. A small block may be merged into a neighbour if, in every partition,
moving the small block alone brings the two together:

- if one predecessor is a descendant of all the others, it can move back to that one's stage;
- if one successor is an ancestor of all the others, it can move ahead to that one's stage;
- if it has no edges, it can move anywhere, and is merged into the next block.

No other block moves. So the smallest bottleneck of the merged graph, with the moved blocks counted
as free, is a lower bound for the original graph.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from random import Random
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Flags, Floats, Integers, Words
from pipectl.planner.graph.blocks import (
    BlockGraph,
    bits,
    contract,
    follows,
    membership,
    words_of,
)
from pipectl.planner.request import Expired
from pipectl.profile import Profile

Partition = tuple[int, ...]
"""Bitset of blocks of every stage, in pipeline order."""
Neighbours = Sequence[Sequence[int]]
"""Predecessors or successors of every block."""
Neighbour = Callable[[BlockGraph, int], int | None]
MAX_DOWNSETS = 4000
"""If a graph has more, only a sample of them is searched."""
NEGLIGIBLE = (0.001, 0.01)
"""Shares of the total time that merged blocks may take together, tried in this order."""


class Lattice(NamedTuple):
    """All downsets, from the empty to the full one, by rising size.

    Args:
        sets: bit b of a row is block b; shape [downsets, words].
        larger_at, larger: downsets with one block more, by rising block; those of downset d begin
            at ``larger_at[d]``.
        added: the added block of each entry of ``larger``.
    """

    sets: Words
    larger_at: Integers
    larger: Integers
    added: Integers


def enumerate_downsets(
    before: Neighbours, after: Neighbours, cap: int, expired: Expired = lambda: False
) -> Lattice | None:
    """Every downset, or None if there are more than ``cap`` or time is up.

    The downsets of n + 1 blocks are those of n blocks plus one block whose predecessors are inside.
    Equal downsets have equal keys: sums of one random number per block.

    Args:
        before, after: predecessors and successors of every block.
    """
    blocks = len(before)
    one = np.zeros((blocks, max(1, -(-blocks // 64))), dtype=np.uint64)  # each block alone
    index = np.arange(blocks)
    one[index, index >> 6] = np.uint64(1) << (index & 63).astype(np.uint64)
    needed = np.array([one[list(each)].sum(axis=0) for each in before], dtype=np.uint64)
    count = np.array([len(each) for each in after], dtype=np.int64)
    first_after = np.cumsum([0, *count])[:-1]
    successors = np.array([block for each in after for block in each], dtype=np.int64)
    draw = Random(0)  # numpy.random takes long to load
    weight = np.array([draw.getrandbits(64) for _ in range(blocks)], dtype=np.uint64)

    sets, keys = np.zeros((1, one.shape[1]), dtype=np.uint64), np.zeros(1, dtype=np.uint64)
    addable = np.array([[not each for each in before]], dtype=np.bool_)
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

    Always includes the graph's own order, and others as long as there are at most ``cap`` downsets.
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
    """Topological orders of the blocks, their own order first.

    The others take ready blocks by depth from either end, by index, or depth first.
    """
    count = len(before)
    depth, height = [0] * count, [0] * count
    for block in range(count):
        depth[block] = max((depth[b] + 1 for b in before[block]), default=0)
    for block in reversed(range(count)):
        height[block] = max((height[b] + 1 for b in after[block]), default=0)
    latest = [max(blocks, default=-1) for blocks in before]
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
        missing = [len(blocks) for blocks in before]
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
        downsets: all of the graph, the empty one first, the full one last.
    """

    def __init__(self, downsets: Sequence[int]) -> None:
        self._downsets = downsets
        self._larger = follows(membership(downsets, downsets[-1].bit_length()))
        # By number of stages: chains from each downset to the full one.
        self._ways = [np.zeros(len(downsets))]
        self._ways[0][-1] = 1

    def count(self, stages: int) -> float:
        """The number of partitions into ``stages`` stages."""
        while len(self._ways) <= stages:
            self._ways.append(self._larger @ self._ways[-1])
        return float(self._ways[stages][0])

    def every_partition(self, stages: int) -> list[Partition]:
        """Every partition into ``stages`` stages."""
        if not self.count(stages):
            return []
        chains = np.zeros((1, 1), dtype=np.int64)
        for ways in self._ways[stages - 1 :: -1]:
            before, after = np.nonzero(self._larger[chains[:, -1]] & (ways > 0))
            chains = np.column_stack((chains[before], after))
        listed = [[self._downsets[state] for state in chain] for chain in chains.tolist()]
        return [tuple(after & ~before for before, after in pairwise(chain)) for chain in listed]


@dataclass(frozen=True)
class Merged:
    """A graph with small blocks merged into others.

    Args:
        moved: indices of the operators of the merged blocks.
    """

    graph: BlockGraph
    moved: tuple[int, ...]


def merge_negligible(graph: BlockGraph, profile: Profile, share: float) -> Merged:
    """Merge the cheapest blocks, which together take at most ``share`` of the total time."""
    small = _cheapest(graph, profile, share)
    moved: set[int] = set()
    for neighbour in (_behind, _ahead, _beside):
        graph, more = _merge(graph, profile, small, neighbour)
        moved |= more
    return Merged(graph, tuple(sorted(moved)))


def _cheapest(graph: BlockGraph, profile: Profile, share: float) -> frozenset[int]:
    times = [
        sum(profile.operators[i].forward_s + profile.operators[i].backward_s for i in b.operators)
        for b in graph.blocks
    ]
    left = share * sum(times)
    cheapest: list[int] = []
    for position in sorted(range(len(times)), key=lambda index: (times[index], index)):
        left -= times[position]
        if left < 0:
            break
        cheapest += graph.blocks[position].operators
    return frozenset(cheapest)


def _merge(
    graph: BlockGraph, profile: Profile, small: frozenset[int], neighbour: Neighbour
) -> tuple[BlockGraph, set[int]]:
    """Merge every small block that can be merged; returns the graph and the moved operators."""
    home = list(range(len(graph)))
    moved: set[int] = set()
    for position, block in enumerate(graph.blocks):
        other = neighbour(graph, position) if small.issuperset(block.operators) else None
        if other is not None:
            home[position] = other
            moved.update(block.operators)
    labels = [_final(home, block) for block in graph.block_of]
    return contract(profile.operators, profile.edge_indices, labels), moved


def _final(home: Sequence[int], block: int) -> int:
    """The block at the end of a chain of merges, all of which go in one direction."""
    while home[block] != block:
        block = home[block]
    return block


def _behind(graph: BlockGraph, block: int) -> int | None:
    """The predecessor of which all others are ancestors."""
    before = graph.predecessors[block]
    last = before.bit_length() - 1
    return last if before and not before & ~(graph.ancestors[last] | 1 << last) else None


def _ahead(graph: BlockGraph, block: int) -> int | None:
    """The successor of which all others are descendants."""
    after = graph.successors[block]
    first = next(bits(after), 0)
    return first if after and not after & ~(graph.descendants[first] | 1 << first) else None


def _beside(graph: BlockGraph, block: int) -> int | None:
    """The next block, if this one has no edges."""
    alone = not graph.predecessors[block] | graph.successors[block]
    return block + 1 if alone and block + 1 < len(graph) else None


@dataclass(frozen=True)
class CutSpace:
    """Downsets of a graph, subsets before supersets.

    Args:
        complete: whether these are all downsets.
        moved: operators of negligible blocks that were merged into others.

    Attributes:
        rows: whether each downset holds each block; shape [downsets, blocks].
        words: the same as packed bits; shape [downsets, words].
    """

    graph: BlockGraph
    downsets: tuple[int, ...]
    complete: bool
    moved: tuple[int, ...] = ()
    rows: Flags = field(init=False, repr=False, compare=False)
    words: Words = field(init=False, repr=False, compare=False)

    @classmethod
    def of(cls, graph: BlockGraph, profile: Profile, cap: int = MAX_DOWNSETS) -> CutSpace:
        """All downsets if there are at most ``cap``, otherwise a subset of them.

        First negligible blocks are merged; if there are still too many downsets, those that are
        prefixes of several topological orders are taken.
        """
        everything = all_downsets(graph, cap)
        if everything is not None:
            return cls(graph, tuple(everything), True)
        for share in NEGLIGIBLE:
            merged = merge_negligible(graph, profile, share)
            everything = all_downsets(merged.graph, cap)
            if everything is not None:
                return cls(merged.graph, tuple(everything), True, merged.moved)
        return cls.sample(graph, cap)

    @classmethod
    def plain(cls, graph: BlockGraph) -> CutSpace:
        """All downsets if there are few, otherwise prefixes; merges no blocks."""
        everything = all_downsets(graph, MAX_DOWNSETS)
        return cls.sample(graph) if everything is None else cls(graph, tuple(everything), True)

    @classmethod
    def sample(cls, graph: BlockGraph, cap: int = MAX_DOWNSETS) -> CutSpace:
        """Prefixes of several topological orders."""
        return cls(graph, tuple(prefix_downsets(graph, cap)), False)

    def __len__(self) -> int:
        return len(self.downsets)

    def __post_init__(self) -> None:
        rows = membership(self.downsets, len(self.graph))
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "words", words_of(rows))

    @cached_property
    def operators(self) -> Flags:
        """Whether each downset holds each operator; shape [downsets, operators]."""
        inside: Flags = self.rows[:, list(self.graph.block_of)]
        return inside

    @cached_property
    def follows(self) -> Flags:
        """Whether one downset is a proper subset of another; shape [downsets, downsets]."""
        return follows(self.rows)

    def sums(self, figures: Sequence[float]) -> Floats:
        """Per downset, the sum of ``figures`` over its blocks."""
        sums: Floats = self.rows.astype(np.float64) @ np.asarray(figures, dtype=np.float64)
        return sums

    def partition(self, chain: Sequence[int]) -> Partition:
        """The stages between consecutive downsets of a chain of indices."""
        ends = [self.downsets[place] for place in chain]
        return tuple(after & ~before for before, after in pairwise(ends))
