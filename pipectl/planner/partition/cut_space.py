"""Where a graph can be cut: downsets, all of them or a sample.

A pipeline is a chain of downsets from the empty set to the whole graph, a stage the difference of
two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from pipectl.arrays import Flags, Floats, Words
from pipectl.planner.graph.blocks import BlockGraph, follows, membership, words_of
from pipectl.planner.graph.downsets import Partition, all_downsets, prefix_downsets
from pipectl.planner.graph.negligible import merge_negligible
from pipectl.profile import Profile

MAX_DOWNSETS = 4000
"""Above, only a sample of the downsets is searched."""
NEGLIGIBLE = (0.001, 0.01)
"""Shares of the whole time that small blocks may take to be merged into others."""


@dataclass(frozen=True)
class CutSpace:
    """The downsets of a graph in an order in which smaller ones come first.

    Args:
        complete: whether these are all downsets.
        moved: operators of negligible blocks that were merged into others to get there.
    """

    graph: BlockGraph
    downsets: tuple[int, ...]
    complete: bool
    moved: tuple[int, ...] = ()

    @classmethod
    def of(cls, graph: BlockGraph, profile: Profile, cap: int = MAX_DOWNSETS) -> CutSpace:
        """All downsets if there are at most ``cap``, or else as many as can be.

        That is those which part no negligible block from its neighbour, and if these are still too
        many, prefixes of several topological orders.
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
        """All downsets if they are few, or else prefixes: no block is merged into another."""
        everything = all_downsets(graph, MAX_DOWNSETS)
        return cls.sample(graph) if everything is None else cls(graph, tuple(everything), True)

    @classmethod
    def sample(cls, graph: BlockGraph, cap: int = MAX_DOWNSETS) -> CutSpace:
        """Prefixes of several topological orders."""
        return cls(graph, tuple(prefix_downsets(graph, cap)), False)

    def __len__(self) -> int:
        return len(self.downsets)

    @cached_property
    def rows(self) -> Flags:
        """Whether each downset holds each block; shape [downsets, blocks]."""
        return membership(self.downsets, len(self.graph))

    @cached_property
    def words(self) -> Words:
        """The same as packed bits; shape [downsets, words]."""
        return words_of(self.rows)

    @cached_property
    def operators(self) -> Flags:
        """Whether each downset holds each operator; shape [downsets, operators]."""
        inside: Flags = self.rows[:, list(self.graph.block_of)]
        return inside

    @cached_property
    def follows(self) -> Flags:
        """Whether each downset holds all of another, and more; the larger one last."""
        return follows(self.rows)

    def between(self, start: int, end: int) -> list[int]:
        """Indices of the operators of the stage between two downsets, ascending."""
        inside = self.operators[end] & ~self.operators[start]
        return [int(index) for index in np.flatnonzero(inside)]

    def sums(self, figures: Sequence[float]) -> Floats:
        """The sum of figures of the blocks that each downset holds."""
        sums: Floats = self.rows.astype(np.float64) @ np.asarray(figures, dtype=np.float64)
        return sums

    def partition(self, chain: Sequence[int]) -> Partition:
        """The stages between the downsets at some places."""
        ends = [self.downsets[place] for place in chain]
        return tuple(after & ~before for before, after in pairwise(ends))
