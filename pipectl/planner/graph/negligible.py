"""Merging blocks that cost next to nothing, where the graph has too many downsets to search them.

A block without edges doubles the number of downsets, and models have many such operators: counters
of batch norms, shapes, masks. Merging one into a neighbour is harmless if every partition can be
turned into one that keeps the two together by moving the small block alone:

- all its predecessors are ancestors of one of them: it can move back to that one's stage;
- all its successors are descendants of one of them: it can move ahead to that one's stage;
- it has neither: it can move anywhere, and goes to the block after it.

The other blocks stay where they are. So the smallest bottleneck of the merged graph, the moved
blocks counted as free, is a lower bound for the graph itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipectl.planner.graph.blocks import BlockGraph, bits, contract
from pipectl.profile import Profile

Neighbour = Callable[[BlockGraph, int], int | None]


@dataclass(frozen=True)
class Merged:
    """A graph with small blocks merged into others.

    Args:
        moved: indices of the operators of the merged blocks.
    """

    graph: BlockGraph
    moved: tuple[int, ...]


def merge_negligible(graph: BlockGraph, profile: Profile, share: float) -> Merged:
    """Merge the cheapest blocks that can be, which together take ``share`` of the whole time."""
    small = _cheapest(graph, profile, share)
    moved: set[int] = set()
    for neighbour in (_behind, _ahead, _beside):
        graph, more = _merge(graph, profile, small, neighbour)
        moved |= more
    return Merged(graph, tuple(sorted(moved)))


def _cheapest(graph: BlockGraph, profile: Profile, share: float) -> frozenset[int]:
    """Operators of the cheapest blocks."""
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
    """Merge every small block into its neighbour, if it has one; also the operators that moved."""
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
    """Where a chain of merges ends; all of them go in one direction."""
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
