"""One planning problem: profile, cluster and request, and the plans its choices make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.plan import Plan, Stage
from pipectl.planner.assumptions import assumptions_of, baseline_bytes, size_assumptions
from pipectl.planner.costs.devices import Placement, Pool, pools
from pipectl.planner.costs.footprint import Footprint, Footprints
from pipectl.planner.costs.liveness import parameter_gradients
from pipectl.planner.costs.operator_times import OperatorTimes, Times
from pipectl.planner.costs.peaks import StageTable
from pipectl.planner.costs.stage_costs import scaled_transfers, stage_costs
from pipectl.planner.graph.blocks import Condensed
from pipectl.planner.graph.downsets import Partition
from pipectl.planner.partition.estimate import Bounds, Layout, numbered_partitions
from pipectl.planner.partition.route_sums import Cuts, PartitionSums, Timings
from pipectl.planner.plans.new_plan import new_plan
from pipectl.planner.request import Order, PlanRequest
from pipectl.profile import Profile

MOST_CUTS = 16
"""Lists of partitions whose sums are kept."""


@dataclass(frozen=True)
class Choice:
    """Everything a plan decides.

    Args:
        placement: rank of every stage.
        size: samples of a micro-batch.
        recompute: whether each stage computes its forward again for its backward; empty if none.
    """

    partition: Partition
    placement: Placement
    size: int
    schedule: str
    warm_up: tuple[int, ...]
    recompute: tuple[bool, ...] = ()


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
        self._bounds = Bounds(cluster)
        self._timings: dict[int, Timings] = {}
        self._known_cuts: dict[tuple[Partition, ...], Cuts] = {}
        self._footprints: dict[Partition, Footprint] = {}
        self._tables: dict[tuple[Partition, int], StageTable] = {}

    @property
    def baseline_bytes(self) -> int:
        """Memory of a process without a stage."""
        return baseline_bytes(self.profile)

    @cached_property
    def assumptions(self) -> tuple[str, ...]:
        """What neither the profile nor the cluster says."""
        return assumptions_of(self.profile, self.cluster)

    def limit_bytes(self, rank: int) -> float:
        """Memory that a rank may take: the smaller of the job's limit and its device's memory."""
        return self.cluster.memory_of(rank, self.request.memory_limit_bytes)

    @property
    def has_limits(self) -> bool:
        """Whether any rank's memory is limited."""
        return any(limit < inf for limit in self.kind_limits_bytes)

    def could_hold(self, stages: int) -> bool:
        """Whether that many ranks have the memory for what stays there in any cut."""
        ranks = sorted(map(self.limit_bytes, range(self.cluster.ranks)), reverse=True)[:stages]
        return self._least_bytes + stages * self.baseline_bytes <= sum(ranks)

    @cached_property
    def _least_bytes(self) -> float:
        """Parameters, optimizer state and gradients, each once."""
        operators = self.profile.operators
        state = self.profile.optimizer_cost.state_bytes_per_parameter_byte
        named = dict(pair for operator in operators for pair in operator.parameters)
        trained = dict(pair for operator in operators for pair in parameter_gradients(operator))
        return sum(named.values()) + (1 + state) * sum(trained.values())

    def scale(self, size: int) -> float:
        """A micro-batch size over the profile's."""
        return size / self.profile.micro_batch_size

    def micro_batches(self, size: int) -> int:
        """Micro-batches of a step."""
        return ceil(self.request.batch_size / size)

    def times(self, size: int) -> Times:
        """Forward and backward of every operator."""
        if size not in self._times:
            self._times[size] = self._operator_times.at(size)
        return self._times[size]

    def timings(self, size: int) -> Timings:
        """The same as arrays."""
        if size not in self._timings:
            self._timings[size] = self._operator_times.arrays_at(size)
        return self._timings[size]

    def block_times(
        self, size: int, free: Sequence[int] = (), *, cached: bool = False
    ) -> list[float]:
        """Forward and backward together of every block, in seconds.

        Args:
            free: indices of operators that are not counted.
            cached: in a stage that finds its data in the cache; otherwise in one that does not.
        """
        cached_s, uncached_s = self.timings(size)
        times_s = (cached_s if cached else uncached_s).sum(axis=0)
        times_s[list(free)] = 0.0
        return self._by_block(times_s)

    def forward_block_times(self, size: int) -> list[float]:
        """Forward of every block, in seconds, where data does not stay in the cache."""
        return self._by_block(self.timings(size)[1][0])

    def _by_block(self, figures: Floats) -> list[float]:
        """Sums over the operators of every block."""
        found: list[float] = np.bincount(self._block_of, figures, len(self.graph)).tolist()
        return found

    @cached_property
    def _block_of(self) -> Integers:
        return np.array(self.graph.block_of, dtype=np.int64)

    @property
    def widest_link(self) -> Link:
        """What messages between stages pass through, if stages are on several nodes."""
        most = min(self.cluster.ranks, len(self.graph))
        several_nodes = self.cluster.node_of_rank[most - 1] > 0
        return self.cluster.between_nodes if several_nodes else self.cluster.within_node

    @cached_property
    def devices(self) -> tuple[Pool, ...]:
        """The cluster's devices by kind, the fastest first."""
        return pools(self.cluster)

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of each kind of device."""
        return tuple(pool.speed for pool in self.devices)

    @cached_property
    def kind_limits_bytes(self) -> tuple[float, ...]:
        """Memory that a rank of each kind may take."""
        return tuple(self.limit_bytes(pool.ranks[0]) for pool in self.devices)

    def shares(self, size: int) -> tuple[float, ...]:
        """Size of every micro-batch of a step relative to a full one."""
        count = self.micro_batches(size)
        last = self.request.batch_size - (count - 1) * size
        return (1.0,) * (count - 1) + (last / size,)

    def plan(self, choice: Choice) -> Plan:
        """The plan a choice makes, without prediction."""
        table = self.table(choice.partition, choice.size)
        again = choice.recompute or (False,) * len(choice.placement)
        parts = zip(
            self._footprints[choice.partition].nodes,
            choice.placement,
            table.costs,
            again,
            strict=True,
        )
        stages = (
            Stage(inside, (rank,), cost, recompute=twice) for inside, rank, cost, twice in parts
        )
        return new_plan(
            self.profile,
            self.cluster,
            self.request,
            stages,
            table.transfers,
            (choice.schedule, choice.warm_up),
            choice.size,
            (*self.assumptions, *size_assumptions(self.profile, choice.size)),
        )

    def table(self, partition: Partition, size: int) -> StageTable:
        """Costs of the stages and the messages between them."""
        if partition not in self._footprints:
            stages = [self.graph.operators_of(blocks) for blocks in partition]
            self._footprints[partition] = self._exact.of(stages)
        if (partition, size) not in self._tables:
            parts, scale = self._footprints[partition], self.scale(size)
            costs = stage_costs(parts, self.times(size), scale, self.profile)
            self._tables[partition, size] = StageTable(costs, scaled_transfers(parts, scale))
        return self._tables[partition, size]

    def bounds_s(self, layouts: Sequence[Layout], size: int, orders: Sequence[Order]) -> Floats:
        """No execution of these layouts in these orders takes less; shape [layouts, orders]."""
        partitions, cut = numbered_partitions(layouts)
        return self._bounds.steps_s(
            layouts,
            cut,
            self._cuts(partitions),
            self.timings(size),
            self.scale(size),
            self.shares(size),
            [warm_up for _, warm_up in orders],
        )

    def _cuts(self, partitions: tuple[Partition, ...]) -> Cuts:
        """Kept for a while: several micro-batch sizes have the same."""
        if partitions not in self._known_cuts:
            if len(self._known_cuts) == MOST_CUTS:
                del self._known_cuts[next(iter(self._known_cuts))]
            self._known_cuts[partitions] = self._cutter.cut(partitions)
        return self._known_cuts[partitions]

    @cached_property
    def _operator_times(self) -> OperatorTimes:
        return OperatorTimes(self.profile)

    @cached_property
    def _cutter(self) -> PartitionSums:
        return PartitionSums(self.profile, self.graph)

    @cached_property
    def _exact(self) -> Footprints:
        return Footprints(self.profile)
