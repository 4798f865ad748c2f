"""Layouts near a given one, for improving it by simulation.

Balance alone does not make a step short: with few micro-batches the way of the first one in and of
the last one out counts as much, and so does what is sent. Moving a border back and forth finds
what the balanced partitions miss, and so does exchanging the ranks of two stages where ranks
differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from pipectl.planner.graph.blocks import BlockGraph, bits, bitset
from pipectl.planner.graph.downsets import Partition
from pipectl.planner.partition.estimate import Layout
from pipectl.planner.partition.plans import Ranks

FRACTIONS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 0.0)
"""Of a stage's load that moves to its neighbour; 0 is a single block."""
_MOST_EXCHANGES = 16
"""Stages up to which any two exchange their ranks; of more, only neighbours do."""


def neighbours(
    layout: Layout, graph: BlockGraph, loads: Sequence[float], *, every: bool = False
) -> Iterator[Layout]:
    """Every layout in which one stage gives some load to a neighbour, or two exchange ranks.

    Borders of the stages with the most load come first.

    Args:
        loads: of every block.
        every: whether any number of blocks moves, and not only some fractions of the load.
    """
    fractions = () if every else FRACTIONS
    for partition in near_partitions(layout.partition, graph, loads, fractions):
        yield layout._replace(partition=partition)
    for ranks in _exchanges(layout.ranks):
        yield layout._replace(ranks=ranks)


def near_partitions(
    partition: Partition, graph: BlockGraph, loads: Sequence[float], fractions: Sequence[float]
) -> Iterator[Partition]:
    """Every partition in which one stage gives some load to the next or to the previous one.

    What moves is the end (or the beginning) of the stage in graph order, or a single block
    behind (or before) which nothing is left in the stage; so stages stay convex.

    Args:
        fractions: of a stage's load that move; if empty, any number of blocks does.
    """
    totals = [sum(loads[block] for block in bits(stage)) for stage in partition]
    borders = range(1, len(partition))
    for border in sorted(borders, key=lambda at: (-max(totals[at - 1 : at + 1]), at)):
        before, after = partition[border - 1 : border + 1]
        tail = _ends(list(bits(before))[::-1], loads, fractions)
        for moved in dict.fromkeys((*tail, *_free(before, graph.successors))):
            yield _with_border(partition, border, before & ~moved, after | moved)
        head = _ends(list(bits(after)), loads, fractions)
        for moved in dict.fromkeys((*head, *_free(after, graph.predecessors))):
            yield _with_border(partition, border, before | moved, after & ~moved)


def _free(stage: int, onward: Sequence[int]) -> Iterator[int]:
    """Single blocks of a stage with several that no other block of it is behind (or before)."""
    if stage & (stage - 1):
        yield from (1 << block for block in bits(stage) if not onward[block] & stage)


def _ends(
    blocks: Sequence[int], loads: Sequence[float], fractions: Sequence[float]
) -> Iterator[int]:
    """The first few of some blocks, for each fraction of their load, never all of them."""
    total = sum(loads[block] for block in blocks)
    counts = {_count(blocks, loads, fraction * total) for fraction in fractions}
    wanted = sorted(counts) if fractions else range(1, len(blocks))
    return (bitset(blocks[:count]) for count in wanted if count < len(blocks))


def _count(blocks: Sequence[int], loads: Sequence[float], amount: float) -> int:
    """How many blocks from the front have at least some load; at least one."""
    for count, block in enumerate(blocks, start=1):
        amount -= loads[block]
        if amount <= 0:
            return count
    return len(blocks)


def _with_border(partition: Partition, border: int, before: int, after: int) -> Partition:
    return (*partition[: border - 1], before, after, *partition[border + 1 :])


def _exchanges(ranks: Ranks) -> Iterator[Ranks]:
    """With the ranks of two stages exchanged."""
    stages = range(len(ranks))
    near = len(ranks) > _MOST_EXCHANGES
    for one, other in combinations(stages, 2):
        if not near or other == one + 1:
            changed = list(ranks)
            changed[one], changed[other] = ranks[other], ranks[one]
            yield tuple(changed)
