"""Downsets of the block graph: everything a prefix of the stages can be.

A set of blocks is a downset (an ideal) when it holds every predecessor of its members. A pipeline
is a chain of downsets from the empty set to the whole graph, a stage the difference of two of
them. Downsets are Python integers: bit b is block b. Of small graphs, all partitions are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from pipectl.planner.graph.blocks import BlockGraph, bits, bitset, membership

Partition = tuple[int, ...]
"""Bitset of blocks of every stage, in pipeline order."""
Rank = Callable[[int], tuple[int, ...]]


def all_downsets(graph: BlockGraph, cap: int) -> list[int] | None:
    """Every downset by rising size, or None if there are more than ``cap``.

    Level by level: the downsets of n + 1 blocks are those of n blocks with one block added whose
    predecessors are inside. Each carries the bitset of the blocks that can be added, which grows
    only by successors of the added block.
    """
    level = {0: bitset(block for block, before in enumerate(graph.predecessors) if not before)}
    found: list[int] = []
    while level:
        found += sorted(level)
        if len(found) > cap:
            return None
        level = _next_level(graph, level, cap - len(found))
    return found


def _next_level(graph: BlockGraph, level: dict[int, int], room: int) -> dict[int, int]:
    """Downsets with one block more and their addable blocks; stops early beyond ``room``."""
    following: dict[int, int] = {}
    for downset, addable in level.items():
        for block in bits(addable):
            larger = downset | 1 << block
            if larger not in following:
                following[larger] = addable & ~(1 << block) | _opened(graph, larger, block)
        if len(following) > room:
            break
    return following


def _opened(graph: BlockGraph, downset: int, added: int) -> int:
    """Successors of ``added`` whose predecessors are now all inside."""
    successors = bits(graph.successors[added])
    return bitset(after for after in successors if not graph.predecessors[after] & ~downset)


def prefix_downsets(graph: BlockGraph, cap: int) -> list[int]:
    """The prefixes of several topological orders by rising size, without duplicates.

    A sample of the downsets. The graph's own order is always among them, others while they fit
    into ``cap``.
    """
    found: set[int] = set()
    for rank in _rankings(graph):
        larger = found.union(_prefixes(graph, rank))
        if found and len(larger) > cap:
            break
        found = larger
    return sorted(found, key=lambda downset: (downset.bit_count(), downset))


def _prefixes(graph: BlockGraph, rank: Rank) -> Iterator[int]:
    """The prefixes of the topological order that always takes the ready block of lowest rank."""
    yield 0
    downset = 0
    ready = {block for block, before in enumerate(graph.predecessors) if not before}
    while ready:
        block = min(ready, key=rank)
        ready.remove(block)
        downset |= 1 << block
        ready.update(bits(_opened(graph, downset, block)))
        yield downset


def _rankings(graph: BlockGraph) -> list[Rank]:
    """Which ready block comes first: by place, by depth from either end, and depth first."""
    count = len(graph)
    depth = [0] * count
    height = [0] * count
    for block in range(count):
        depth[block] = max((depth[b] + 1 for b in bits(graph.predecessors[block])), default=0)
    for block in reversed(range(count)):
        height[block] = max((height[b] + 1 for b in bits(graph.successors[block])), default=0)
    latest = [max(bits(before), default=-1) for before in graph.predecessors]
    return [
        lambda block: (block,),
        lambda block: (depth[block], block),
        lambda block: (-height[block], block),
        lambda block: (-depth[block], block),
        lambda block: (height[block], block),
        lambda block: (-latest[block], block),
        lambda block: (-latest[block], -block),
        lambda block: (-block,),
    ]


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
