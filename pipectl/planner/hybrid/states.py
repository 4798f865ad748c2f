"""What a prefix of the stages can hold: downsets of the graph, which cuts are chosen from.

A pipeline is a chain of states from nothing to everything, a stage the difference of two
neighbours. Graphs with few downsets give all of them; of others, the prefixes of topological
orders are taken, of which every two are comparable if only one order fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipectl.arrays import Flags
from pipectl.planner.graph.blocks import BlockGraph, condense, follows, membership
from pipectl.planner.graph.downsets import all_downsets, prefix_downsets
from pipectl.profile import Profile

MOST_STATES = 640
"""Of all downsets; with more, prefixes of topological orders are used."""
MOST_PREFIXES = 2000
"""Of the prefixes of several orders; the first order's own are always taken."""


@dataclass(frozen=True)
class States:
    """Downsets by rising size, from nothing to everything.

    Args:
        members: shape (states, operators); whether an operator is inside.
        follows: shape (states, states); ``follows[i, j]`` if j holds all of i and more.
        complete: whether these are all downsets.
    """

    members: Flags
    follows: Flags
    complete: bool

    def __len__(self) -> int:
        return len(self.members)

    def between(self, start: int, end: int) -> list[int]:
        """Indices of the operators of the stage between two states, ascending."""
        inside = self.members[end] & ~self.members[start]
        return [int(index) for index in np.flatnonzero(inside)]

    def crossing(self, edges: Sequence[tuple[int, int]]) -> Flags:
        """Shape (states, operators): whether an operator's value is read behind the state."""
        read = np.zeros_like(self.members)
        for source, target in edges:
            read[:, source] |= ~self.members[:, target]
        return read & self.members

    @classmethod
    def of(cls, profile: Profile, cap: int = MOST_STATES) -> States:
        """The states of a profile's graph."""
        graph = condense(profile)
        found = all_downsets(graph, cap)
        complete = found is not None
        downsets = prefix_downsets(graph, MOST_PREFIXES) if found is None else found
        return cls.chosen(graph, downsets, complete=complete)

    @classmethod
    def chosen(cls, graph: BlockGraph, downsets: Sequence[int], *, complete: bool) -> States:
        """Given downsets of the condensed graph, as bitsets of its blocks by rising size."""
        rows = membership(downsets, len(graph))
        return cls(rows[:, list(graph.block_of)], follows(rows), complete)
