"""All partitions of small graphs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pipectl.planner.spans import Partition, membership


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

    def every_partition(self, stages: int, most: int) -> list[Partition] | None:
        """Every chain from the empty to the full one, or None if there are more than ``most``."""
        # By number of stages: chains from each downset to the full one.
        count = [np.zeros(len(self._downsets))]
        count[0][-1] = 1
        for _ in range(stages):
            count.append(self._larger @ count[-1])
        if count[stages][0] > most:
            return None
        chains = np.zeros((1, 1), dtype=np.int64)
        for ways in count[stages - 1 :: -1]:
            before, after = np.nonzero(self._larger[chains[:, -1]] & (ways > 0))
            chains = np.column_stack((chains[before], after))
        held = [[self._downsets[state] for state in chain] for chain in chains.tolist()]
        return [tuple(after & ~before for before, after in pairwise(chain)) for chain in held]
