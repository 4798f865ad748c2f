"""One planning problem: profile, cluster and request, and the plans its choices make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Stage, StageCost, Transfer
from pipectl.planner.condense import Condensed
from pipectl.planner.costs import (
    Footprint,
    Footprints,
    Times,
    operator_times,
    scaled_transfers,
    stage_costs,
    working_set_bytes,
)
from pipectl.planner.placement import Placement
from pipectl.planner.request import PlanRequest
from pipectl.planner.spans import Partition
from pipectl.profile import Profile

DEFAULT_BASELINE_BYTES = 240 * 2**20
"""A process with Python, torch and MPI, where the profile does not say."""


def baseline_bytes(profile: Profile) -> int:
    """Memory of a process without a stage."""
    measured = profile.process_baseline_bytes
    return DEFAULT_BASELINE_BYTES if measured is None else measured


@dataclass(frozen=True)
class Choice:
    """Everything a plan decides.

    Args:
        size: samples of a micro-batch.
    """

    partition: Partition
    placement: Placement
    size: int
    schedule: str
    warm_up: tuple[int, ...]


class Problem:
    """Builds plans for choices; what several choices share is computed once.

    Args:
        graph: the profile's, condensed; partitions are of its blocks.
    """

    def __init__(
        self, profile: Profile, cluster: Cluster, request: PlanRequest, graph: Condensed
    ) -> None:
        self.profile = profile
        self.cluster = cluster
        self.request = request
        self.graph = graph
        self._times: dict[int, Times] = {}
        self._cutter = Footprints(profile)
        self._footprints: dict[Partition, Footprint] = {}
        self._parts: dict[
            tuple[Partition, int], tuple[tuple[StageCost, ...], tuple[Transfer, ...]]
        ] = {}

    @property
    def baseline_bytes(self) -> int:
        """Memory of a process without a stage."""
        return baseline_bytes(self.profile)

    @cached_property
    def assumptions(self) -> tuple[str, ...]:
        """What neither the profile nor the cluster says."""
        found = list(self.profile.assumptions)
        if self.profile.process_baseline_bytes is None:
            found.append(f"a process without a stage takes {DEFAULT_BASELINE_BYTES >> 20} MiB")
        return (*found, *self.cluster.assumptions)

    def limit_bytes(self, rank: int) -> float:
        """Memory that a rank may take: the smaller of the job's limit and its device's memory."""
        limits = (self.request.memory_limit_bytes, self.cluster.device(rank).memory_bytes)
        return min((limit for limit in limits if limit is not None), default=inf)

    def scale(self, size: int) -> float:
        """A micro-batch size over the profile's."""
        return size / self.profile.micro_batch_size

    def micro_batches(self, size: int) -> int:
        """Micro-batches of a step."""
        return ceil(self.request.batch_size / size)

    def times(self, size: int) -> Times:
        """Forward and backward of every operator."""
        if size not in self._times:
            self._times[size] = operator_times(self.profile, size)
        return self._times[size]

    def block_times(
        self, size: int, free: Sequence[int] = (), *, cached: bool = False
    ) -> list[float]:
        """Forward and backward together of every block, in seconds.

        Args:
            free: indices of operators that are not counted.
            cached: whether every stage shall find its data in the cache; otherwise as many as if
                all ranks had an equal share of the model.
        """
        times, skipped = self.times(size), set(free)
        share = 0.0 if cached else self._uncached_share(size)
        return [
            sum(times.total((i for i in block.operators if i not in skipped), share))
            for block in self.graph.blocks
        ]

    def _uncached_share(self, size: int) -> float:
        everything = self._cutter.of([range(len(self.profile.operators))])
        share_bytes = working_set_bytes(everything, 0, self.scale(size)) / self.cluster.ranks
        return self.profile.stage.uncached(share_bytes)

    def plan(self, choice: Choice) -> Plan:
        """The plan a choice makes, without prediction."""
        costs, transfers = self.costs(choice.partition, choice.size)
        nodes = self._footprints[choice.partition].nodes
        request = self.request
        return Plan(
            name=request.name,
            fingerprint=self.profile.fingerprint,
            schedule=choice.schedule,
            warm_up=choice.warm_up,
            batch_size=request.batch_size,
            micro_batch_size=choice.size,
            micro_batches=self.micro_batches(choice.size),
            stages=tuple(
                Stage(inside, (rank,), cost)
                for inside, rank, cost in zip(nodes, choice.placement, costs, strict=True)
            ),
            transfers=transfers,
            node_of_rank=self.cluster.node_of_rank,
            memory_limit_bytes=request.memory_limit_bytes,
            key=request.key,
            assumptions=self.assumptions + self._size_assumptions(choice.size),
        )

    def costs(
        self, partition: Partition, size: int
    ) -> tuple[tuple[StageCost, ...], tuple[Transfer, ...]]:
        """Costs of the stages and the messages between them."""
        if partition not in self._footprints:
            stages = [self.graph.operators_of(blocks) for blocks in partition]
            self._footprints[partition] = self._cutter.of(stages)
        if (partition, size) not in self._parts:
            parts, scale = self._footprints[partition], self.scale(size)
            costs = stage_costs(parts, self.times(size), scale, self.profile)
            self._parts[partition, size] = costs, scaled_transfers(parts, scale)
        return self._parts[partition, size]

    def _size_assumptions(self, size: int) -> tuple[str, ...]:
        found = []
        measured = self.profile.micro_batch_size
        if size != measured and not any(operator.timings for operator in self.profile.operators):
            found.append(
                f"times of {size} samples are taken as proportional to those of {measured}"
            )
        asked = self.request.micro_batches
        if asked not in (None, self.micro_batches(size)):
            found.append(
                f"{asked} micro-batches of {self.request.batch_size} samples cannot be of one size "
                f"with a smaller last one: {self.micro_batches(size)} of {size} samples instead"
            )
        return tuple(found)
