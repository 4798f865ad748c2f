"""All partitions of small graphs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pipectl.planner.graphs.bitsets import membership
from pipectl.planner.partition.cut_space import Partition


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
