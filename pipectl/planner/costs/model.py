"""What blocks and the stages of partitions cost, each computed once: plans share stages."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Integers
from pipectl.plan import StageCost, Transfer
from pipectl.planner.costs.footprint import Footprint, Footprints
from pipectl.planner.costs.stage_costs import (
    OperatorTimes,
    scaled_transfers,
    stage_costs,
    with_halves,
)
from pipectl.planner.graph.blocks import BlockGraph
from pipectl.planner.graph.downsets import Partition
from pipectl.profile import Profile


class PartitionCosts(NamedTuple):
    """What the stages of a partition cost, with one replica each.

    Args:
        footprint: at the profile's micro-batch size.
        transfers: the values between stages.
    """

    footprint: Footprint
    stages: tuple[StageCost, ...]
    transfers: tuple[Transfer, ...]


class ModelCosts:
    """The costs of the blocks and partitions of one graph.

    Args:
        graph: of blocks of the profile's operators.
    """

    def __init__(self, profile: Profile, graph: BlockGraph) -> None:
        self.times = OperatorTimes(profile)
        self.footprints = Footprints(profile)
        self._profile = profile
        self._graph = graph
        self._operators_of: dict[int, tuple[int, ...]] = {}
        self._parts: dict[Partition, Footprint] = {}
        self._known: dict[tuple[Partition, int, bool], PartitionCosts] = {}

    def on(self, graph: BlockGraph) -> ModelCosts:
        """The costs of another graph of the same profile."""
        other = copy(self)
        other._graph, other._operators_of, other._parts, other._known = graph, {}, {}, {}
        other.__dict__.pop("_block_of", None)
        return other

    def block_times(
        self, size: int, free: Sequence[int] = (), *, cached: bool = False, forward: bool = False
    ) -> list[float]:
        """Forward and backward together of every block, in seconds.

        Args:
            size: samples of a micro-batch.
            free: indices of operators that count as 0.
            cached: whether the data of the stage stays in the cache.
            forward: whether only forwards count.
        """
        cached_s, uncached_s = self.times.at(size)
        both_s = cached_s if cached else uncached_s
        times_s = both_s[0].copy() if forward else both_s.sum(axis=0)
        times_s[list(free)] = 0.0
        sums: list[float] = np.bincount(self._block_of, times_s, len(self._graph)).tolist()
        return sums

    @cached_property
    def _block_of(self) -> Integers:
        return np.array(self._graph.block_of, dtype=np.int64)

    def of(self, partition: Partition, size: int, *, splits: bool = False) -> PartitionCosts:
        """The costs of a partition.

        Args:
            size: samples of a micro-batch.
            splits: whether the schedule splits backwards.
        """
        key = partition, size, splits
        if key not in self._known:
            parts, scale = self._footprint(partition), size / self._profile.micro_batch_size
            costs = stage_costs(parts, self.times.at(size), scale, self._profile)
            if splits:
                costs = with_halves(costs, parts, scale, self._profile)
            self._known[key] = PartitionCosts(parts, costs, scaled_transfers(parts, scale))
        return self._known[key]

    def _footprint(self, partition: Partition) -> Footprint:
        if partition not in self._parts:
            known = self._operators_of
            for blocks in partition:
                if blocks not in known:
                    known[blocks] = tuple(self._graph.operators_of(blocks))
            self._parts[partition] = self.footprints.of([known[blocks] for blocks in partition])
        return self._parts[partition]
