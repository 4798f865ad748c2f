"""Partitions near a given one, for improving it by simulation.

Balance alone does not make a step short: with few micro-batches the way of the first one in and of
the last one out counts as much, and so does what is sent. Moving a border back and forth finds
what the balanced partitions miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipectl.planner.condense import bits, bitset
from pipectl.planner.spans import Partition

FRACTIONS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 0.0)
"""Of a stage's load that moves to its neighbour; 0 is a single block."""


def neighbours(partition: Partition, loads: Sequence[float]) -> Iterator[Partition]:
    """Every partition in which one stage gives some load to the next or to the previous one.

    What moves is the end (or the beginning) of the stage in graph order, so stages stay convex.

    Args:
        loads: of every block.
    """
    for border in range(1, len(partition)):
        before, after = partition[border - 1 : border + 1]
        for moved in _ends(list(bits(before))[::-1], loads):
            yield _with_border(partition, border, before & ~moved, after | moved)
        for moved in _ends(list(bits(after)), loads):
            yield _with_border(partition, border, before | moved, after & ~moved)


def _ends(blocks: Sequence[int], loads: Sequence[float]) -> Iterator[int]:
    """The first few of some blocks, for each fraction of their load, never all of them."""
    total = sum(loads[block] for block in blocks)
    counts = {_count(blocks, loads, fraction * total) for fraction in FRACTIONS}
    return (bitset(blocks[:count]) for count in sorted(counts) if count < len(blocks))


def _count(blocks: Sequence[int], loads: Sequence[float], amount: float) -> int:
    """How many blocks from the front have at least some load; at least one."""
    for count, block in enumerate(blocks, start=1):
        amount -= loads[block]
        if amount <= 0:
            return count
    return len(blocks)


def _with_border(partition: Partition, border: int, before: int, after: int) -> Partition:
    return (*partition[: border - 1], before, after, *partition[border + 1 :])
