"""One planning problem: profile, cluster, request and graph, and figures that searches look up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil, inf

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.plan import Plan, Replication
from pipectl.planner.assumptions import baseline_bytes
from pipectl.planner.costs.devices import Pool, pools
from pipectl.planner.costs.liveness import parameter_gradients
from pipectl.planner.costs.stage_memory import StageTable
from pipectl.planner.graph.blocks import BlockGraph
from pipectl.planner.partition.estimate import Estimator, Layout
from pipectl.planner.partition.plans import Choice, Members, PlanBuilder
from pipectl.planner.request import Order, PlanRequest
from pipectl.profile import Profile


class Problem:
    """What is to be planned; what several choices share is computed once.

    Args:
        graph: of the profile's blocks; partitions are of these.
    """

    def __init__(
        self, profile: Profile, cluster: Cluster, request: PlanRequest, graph: BlockGraph
    ) -> None:
        self.profile = profile
        self.cluster = cluster
        self.request = request
        self.graph = graph
        self.builder = PlanBuilder(profile, cluster, request)
        self.estimator = Estimator(profile, cluster, request, graph, self.builder.times)
        self._operators_of: dict[int, tuple[int, ...]] = {}

    @property
    def baseline_bytes(self) -> int:
        """Memory of a process without a stage."""
        return baseline_bytes(self.profile)

    def limit_bytes(self, rank: int) -> float:
        """Memory that a rank may take: the smaller of the job's limit and its device's memory."""
        return self.cluster.memory_of(rank, self.request.memory_limit_bytes)

    @cached_property
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

    def shares(self, size: int) -> tuple[float, ...]:
        """Size of every micro-batch of a step relative to a full one."""
        count = self.micro_batches(size)
        last = self.request.batch_size - (count - 1) * size
        return (1.0,) * (count - 1) + (last / size,)

    def block_times(
        self, size: int, free: Sequence[int] = (), *, cached: bool = False
    ) -> list[float]:
        """Forward and backward together of every block, in seconds.

        Args:
            free: indices of operators that are not counted.
            cached: in a stage that finds its data in the cache; otherwise in one that does not.
        """
        cached_s, uncached_s = self.builder.times.arrays_at(size)
        times_s = (cached_s if cached else uncached_s).sum(axis=0)
        times_s[list(free)] = 0.0
        return self._by_block(times_s)

    def forward_block_times(self, size: int) -> list[float]:
        """Forward of every block, in seconds, where data does not stay in the cache."""
        return self._by_block(self.builder.times.arrays_at(size)[1][0])

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

    def members(self, partition: Sequence[int]) -> Members:
        """The operators of the stages of a partition."""
        return tuple(map(self._stage_members, partition))

    def _stage_members(self, blocks: int) -> tuple[int, ...]:
        if blocks not in self._operators_of:
            self._operators_of[blocks] = tuple(self.graph.operators_of(blocks))
        return self._operators_of[blocks]

    def choice(
        self,
        layout: Layout,
        size: int,
        order: Order,
        replication: Replication = Replication.WHOLE,
    ) -> Choice:
        """A layout with micro-batches of ``size`` samples in an order."""
        members = self.members(layout.partition)
        return Choice(members, layout.ranks, size, *order, replication, layout.recompute)

    def plan(self, choice: Choice) -> Plan:
        """The plan a choice makes, without prediction."""
        return self.builder.plan(choice)

    def table(self, partition: Sequence[int], size: int) -> StageTable:
        """Costs of the stages and the messages between them."""
        return self.builder.table(self.members(partition), size)

    def estimates_s(self, layouts: Sequence[Layout], size: int, orders: Sequence[Order]) -> Floats:
        """Estimated steps of layouts with equally many stages; shape [layouts, orders]."""
        return self.estimator.steps_s(layouts, size, [warm_up for _, warm_up in orders])
