"""A planning problem: the model, the devices and the request, with the tables that searches use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from math import ceil, inf

from pipectl.cluster import Cluster
from pipectl.plan import Plan
from pipectl.planner.costs.devices import pools
from pipectl.planner.costs.footprint import baseline_bytes
from pipectl.planner.costs.model import ModelCosts
from pipectl.planner.graph.blocks import BlockGraph, bitset, condense
from pipectl.planner.graph.downsets import Partition
from pipectl.planner.partition.estimate import Estimator
from pipectl.planner.partition.layout import Layout
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile


class Problem:
    """A planning problem.

    Args:
        graph: of the profile's blocks, which partitions are of; by default its condensed graph.
        same: a problem of the same profile, whose tables are used.

    Attributes:
        devices: of the cluster by kind, the fastest first.
        costs: what blocks and the stages of partitions cost.
        estimator: estimates the steps of layouts.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        request: PlanRequest,
        graph: BlockGraph | None = None,
        same: Problem | None = None,
    ) -> None:
        self.profile = profile
        self.cluster = cluster
        self.request = request
        self.graph = condense(profile) if graph is None else graph
        self.devices = pools(cluster)
        self.baseline_bytes = baseline_bytes(profile)
        if same is None:
            self.costs = ModelCosts(profile, self.graph)
        else:
            self.costs = same.costs if same.graph is self.graph else same.costs.on(self.graph)
        self.estimator = Estimator(profile, cluster, request, self.graph, self.costs)

    def on(
        self,
        *,
        cluster: Cluster | None = None,
        request: PlanRequest | None = None,
        graph: BlockGraph | None = None,
    ) -> Problem:
        """The same model on other devices, for another request, or with other blocks."""
        return Problem(
            self.profile,
            cluster or self.cluster,
            request or self.request,
            graph or self.graph,
            self,
        )

    def limit_bytes(self, rank: int) -> float:
        """Memory that a rank may take: the smaller of the job's limit and its device's memory."""
        return self.cluster.memory_of(rank, self.request.memory_limit_bytes)

    def excess_bytes(self, plan: Plan) -> float:
        """The largest excess of a rank over its limit, in a plan with a prediction."""
        assert plan.prediction is not None
        peaks = plan.prediction.peak_memory_bytes
        return max(peak - self.limit_bytes(rank) for rank, peak in enumerate(peaks))

    def fits(self, plan: Plan) -> bool:
        """Whether every rank of a plan with a prediction stays within its limit."""
        return self.excess_bytes(plan) <= 0

    def stage_fits(self, plan: Plan, stage: int) -> bool:
        """Whether the ranks of a stage of a plan with a prediction stay within their limits."""
        assert plan.prediction is not None
        own, peaks = plan.stages[stage], plan.prediction.peak_memory_bytes
        return all(peaks[rank] <= self.limit_bytes(rank) for rank in own.every_rank)

    @cached_property
    def has_limits(self) -> bool:
        """Whether any rank's memory is limited."""
        return any(limit < inf for limit in self.kind_limits_bytes)

    def could_hold(self, stages: int) -> bool:
        """Whether ``stages`` ranks have memory for the capture, and for what every cut needs."""
        limits = sorted(map(self.limit_bytes, range(self.cluster.ranks)), reverse=True)[:stages]
        if min(limits) < self.profile.capture_bytes:
            return False
        return self._least_bytes + stages * self.baseline_bytes <= sum(limits)

    @cached_property
    def _least_bytes(self) -> float:
        """Bytes of parameters, optimizer state and gradients, each once."""
        operators = self.profile.operators
        state = self.profile.optimizer_cost.state_bytes_per_parameter_byte
        named = dict(pair for operator in operators for pair in operator.parameters)
        trained = dict(pair for operator in operators for pair in operator.parameter_gradients)
        return sum(named.values()) + (1 + state) * sum(trained.values())

    def scale(self, size: int) -> float:
        """The ratio of a micro-batch size to the profile's."""
        return size / self.profile.micro_batch_size

    def micro_batches(self, size: int) -> int:
        """Micro-batches of a step."""
        return ceil(self.request.batch_size / size)

    def shares(self, size: int) -> tuple[float, ...]:
        """Size of every micro-batch of a step relative to a full one."""
        count = self.micro_batches(size)
        last = self.request.batch_size - (count - 1) * size
        return (1.0,) * (count - 1) + (last / size,)

    @cached_property
    def unreplicated(self) -> int:
        """The blocks that no replicas may compute: each would write a buffer of its own that later
        forwards read, and train something else. A request for a fixed number overrides this.
        """
        index_of, home = self.profile.index_of, self.graph.block_of
        return bitset({home[index_of[node]] for _, node in self.profile.carried})

    def may_replicate(self, layout: Layout) -> bool:
        """Whether the replicas of a layout train what one rank trains."""
        stages = zip(layout.partition, layout.ranks, strict=True)
        return not any(len(ranks) > 1 and blocks & self.unreplicated for blocks, ranks in stages)

    def with_needed_recompute(self, plan: Plan) -> Plan:
        """The plan, in which stages recompute that otherwise could not run; if they may.

        A rank that has only backwards cannot know what code of a stage's own has done, unless it
        runs the forward again.
        """
        own = self._own_code if self.request.recompute is None else frozenset()
        if not own:
            return plan
        stages = (
            replace(stage, recompute=True)
            if stage.backward_ranks and not (stage.recompute or own.isdisjoint(stage.nodes))
            else stage
            for stage in plan.stages
        )
        return replace(plan, stages=tuple(stages))

    def can_run(self, plan: Plan) -> bool:
        """Whether the ranks of backwards can compute them; see :meth:`with_needed_recompute`."""
        return all(
            stage.recompute or not stage.backward_ranks or self._own_code.isdisjoint(stage.nodes)
            for stage in self.with_needed_recompute(plan).stages
        )

    @cached_property
    def _own_code(self) -> frozenset[str]:
        return frozenset(self.profile.own_code)

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speed of each kind of device."""
        return tuple(pool.speed for pool in self.devices)

    @cached_property
    def kind_limits_bytes(self) -> tuple[float, ...]:
        """Memory that a rank of each kind may take."""
        return tuple(self.limit_bytes(pool.ranks[0]) for pool in self.devices)

    def partition_of(self, stages: Iterable[Iterable[str]]) -> Partition:
        """The partition with these stages, as operator ids."""
        index_of, home = self.profile.index_of, self.graph.block_of
        return tuple(bitset({home[index_of[node]] for node in nodes}) for nodes in stages)
