"""A planning problem: the tables that searches use, and the construction of plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil, inf

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.plan import Plan, Replication, Stage, StageCost, Transfer
from pipectl.planner.costs.devices import Pool, one_each, pools
from pipectl.planner.costs.footprint import (
    DEFAULT_BASELINE_BYTES,
    Footprint,
    Footprints,
    baseline_bytes,
)
from pipectl.planner.costs.stage_costs import (
    ASSUMED,
    OperatorTimes,
    scaled_transfers,
    stage_costs,
    with_halves,
)
from pipectl.planner.graph.blocks import BlockGraph, bitset, condense
from pipectl.planner.graph.downsets import Partition
from pipectl.planner.partition.estimate import Estimator
from pipectl.planner.partition.layout import Choice, Layout, Ranks
from pipectl.planner.request import Order, PlanRequest, micro_batch_sizes, open_orders
from pipectl.profile import Profile
from pipectl.schedule import SCHEDULES, default_warm_up
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B
from pipectl.units import plural

MICRO_BATCHES_PER_STAGE = 8
"""With more, the step hardly gets shorter: the bubble is then about a tenth."""
MICRO_BATCHES_IF_PROPORTIONAL = 4
"""The same if times of small micro-batches are scaled from a larger size, not measured."""


class Problem:
    """A planning problem; values that several choices share are computed once.

    Args:
        graph: of the profile's blocks, which partitions are of; by default its condensed graph.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        request: PlanRequest,
        graph: BlockGraph | None = None,
    ) -> None:
        self.profile = profile
        self.cluster = cluster
        self.request = request
        self.times = OperatorTimes(profile)
        self.baseline_bytes = baseline_bytes(profile)
        if graph is not None:
            self.graph = graph
        self._operators_of: dict[int, tuple[int, ...]] = {}
        self.footprints = Footprints(profile)
        self._parts: dict[Partition, Footprint] = {}
        self._costs: dict[tuple[Partition, int, bool], tuple[StageCost, ...]] = {}
        self._transfers: dict[tuple[Partition, int], tuple[Transfer, ...]] = {}

    @cached_property
    def graph(self) -> BlockGraph:
        """Operators that must share a stage are one block."""
        return condense(self.profile)

    @cached_property
    def estimator(self) -> Estimator:
        """Estimates the steps of layouts."""
        return Estimator(
            self.profile,
            self.cluster,
            self.request,
            self.graph,
            self.times,
            self.footprints,
        )

    def limit_bytes(self, rank: int) -> float:
        """Memory that a rank may take: the smaller of the job's limit and its device's memory."""
        return self.cluster.memory_of(rank, self.request.memory_limit_bytes)

    def excess_bytes(self, plan: Plan) -> float:
        """The largest excess of a rank over its limit, in a plan with a prediction."""
        assert plan.prediction is not None
        peaks = plan.prediction.peak_memory_bytes
        return max(peak - self.limit_bytes(rank) for rank, peak in enumerate(peaks))

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

    def block_times(
        self, size: int, free: Sequence[int] = (), *, cached: bool = False
    ) -> list[float]:
        """Forward and backward together of every block, in seconds.

        Args:
            free: indices of operators that count as 0.
            cached: whether the data of the stage stays in the cache.
        """
        cached_s, uncached_s = self.times.at(size)
        times_s = (cached_s if cached else uncached_s).sum(axis=0)
        times_s[list(free)] = 0.0
        return self._by_block(times_s)

    def forward_block_times(self, size: int) -> list[float]:
        """Forward of every block, in seconds, uncached."""
        return self._by_block(self.times.at(size).uncached[0])

    def _by_block(self, figures: Floats) -> list[float]:
        sums: list[float] = np.bincount(self._block_of, figures, len(self.graph)).tolist()
        return sums

    @cached_property
    def _block_of(self) -> Integers:
        return np.array(self.graph.block_of, dtype=np.int64)

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

    @property
    def link_between_stages(self) -> Link:
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
        """Speed of each kind of device."""
        return tuple(pool.speed for pool in self.devices)

    @cached_property
    def kind_limits_bytes(self) -> tuple[float, ...]:
        """Memory that a rank of each kind may take."""
        return tuple(self.limit_bytes(pool.ranks[0]) for pool in self.devices)

    def assumptions(self, size: int) -> tuple[str, ...]:
        """Assumptions about micro-batches of ``size`` samples for want of measurements, and why
        their number is not as requested."""
        profile, request, measured = self.profile, self.request, self.profile.micro_batch_size
        said = list(profile.assumptions)
        if profile.process_baseline_bytes is None:
            mebibytes = DEFAULT_BASELINE_BYTES >> 20
            said.append(f"a process without a stage takes {mebibytes} MiB")
        edge_sizes = profile.edge_bytes.items()
        if any(size != profile.by_id[source].output_bytes for (source, _), size in edge_sizes):
            said.append("a message has the output_bytes of its operator: edge_bytes are not used")
        said += self.cluster.assumptions
        if size != measured and not profile.has_several_sizes:
            times = f"times of {plural(size, 'sample')}"
            said.append(f"{times} are taken as proportional to those of {measured}")
        count, copies = self.micro_batches(size), request.replicas or 1
        if request.micro_batches not in (None, count):
            equally = f" and be shared evenly by {copies} replicas" if copies > 1 else ""
            said.append(
                f"{request.micro_batches} micro-batches of {request.batch_size} samples cannot be "
                f"of one size with a smaller last one{equally}: {count} of {size} samples instead"
            )
        return tuple(said)

    def partition_of(self, stages: Iterable[Iterable[str]]) -> Partition:
        """The partition with these stages, as operator ids."""
        index_of, home = self.profile.index_of, self.graph.block_of
        return tuple(bitset({home[index_of[node]] for node in nodes}) for nodes in stages)

    def footprint(self, partition: Partition) -> Footprint:
        """The footprint of a partition, at the profile's micro-batch size."""
        if partition not in self._parts:
            known = self._operators_of
            for blocks in partition:
                if blocks not in known:
                    known[blocks] = tuple(self.graph.operators_of(blocks))
            self._parts[partition] = self.footprints.of([known[blocks] for blocks in partition])
        return self._parts[partition]

    def costs(
        self, partition: Partition, size: int, *, splits: bool = False
    ) -> tuple[StageCost, ...]:
        """Costs of stages with one replica each.

        Args:
            splits: whether the schedule splits backwards.
        """
        key = partition, size, splits
        if key not in self._costs:
            parts, scale = self.footprint(partition), self.scale(size)
            if splits:
                costs = with_halves(self.costs(partition, size), parts, scale, self.profile)
            else:
                costs = stage_costs(parts, self.times.at(size), scale, self.profile)
            self._costs[key] = costs
        return self._costs[key]

    def _transfers_of(self, partition: Partition, size: int) -> tuple[Transfer, ...]:
        if (partition, size) not in self._transfers:
            transfers = scaled_transfers(self.footprint(partition), self.scale(size))
            self._transfers[partition, size] = transfers
        return self._transfers[partition, size]

    def plan(self, choice: Choice) -> Plan:
        """The plan of a choice, without a prediction."""
        request, size, layout = self.request, choice.size, choice.layout
        micro_batches, count = self.micro_batches(size), len(layout.partition)
        listed = request.listed
        splits = listed.splits if listed else SCHEDULES[choice.schedule].splits_backward
        assumptions = self.assumptions(size)
        stages = zip(
            self.footprint(layout.partition).nodes,
            layout.ranks,
            self._costs_of(choice, splits=splits),
            choice.backward_ranks or ((),) * count,
            layout.recompute or (bool(request.recompute),) * count,
            strict=True,
        )
        return Plan(
            name=request.name,
            fingerprint=self.profile.fingerprint,
            schedule=choice.schedule,
            warm_up=choice.warm_up,
            batch_size=request.batch_size,
            micro_batch_size=size,
            micro_batches=micro_batches,
            stages=tuple(
                Stage(nodes, ranks, cost, elsewhere, recompute=again)
                for nodes, ranks, cost, elsewhere, again in stages
            ),
            transfers=self._transfers_of(layout.partition, size),
            node_of_rank=self.cluster.node_of_rank,
            memory_limit_bytes=request.memory_limit_bytes,
            key=request.key,
            offload_to=request.offload_to,
            replication=choice.replication,
            shard_optimizer=request.shard_optimizer,
            updates_together=request.updates_together,
            assumptions=(
                (*assumptions, ASSUMED) if splits and self.profile.split is None else assumptions
            ),
        )

    def stages_in_turn(self, stages: Sequence[Sequence[str]]) -> Plan:
        """A plan by 1F1B for stages as operator ids; stage s is on rank s."""
        request = self.request
        own = ceil(request.batch_size / self.profile.micro_batch_size)
        size = ceil(request.batch_size / (request.micro_batches or own))
        warm_up = default_warm_up(ONE_F_ONE_B.name, len(stages), self.micro_batches(size))
        layout = Layout(self.partition_of(stages), one_each(tuple(range(len(stages)))))
        return self.plan(Choice(layout, size, ONE_F_ONE_B.name, warm_up))

    def sizes(self, stages: int) -> list[int]:
        """Micro-batch sizes to try with a number of stages, largest first."""
        several = self.profile.has_several_sizes
        most = MICRO_BATCHES_PER_STAGE if several else MICRO_BATCHES_IF_PROPORTIONAL
        return micro_batch_sizes(self.request, stages * most)

    def orders(self, stages: int, size: int) -> list[Order]:
        """Schedules and warm-ups to try, the fewest micro-batches in flight first."""
        return open_orders(self.request, stages, self.micro_batches(size))

    def in_every_order(self, partition: Partition, ranks: Ranks, size: int) -> Iterator[Plan]:
        """Plans with every open schedule and warm-up.

        If the backward of a stage has a rank of its own, one more micro-batch is in flight between
        the two ranks.

        Args:
            ranks: of each stage: one, or one for the forward and one for the backward.
        """
        request = self.request
        stages, count = len(partition), self.micro_batches(size)
        orders = self.orders(stages, size)
        apart = max(map(len, ranks)) > 1
        if apart and request.warm_up is None and request.schedule in (None, ONE_F_ONE_B.name):
            deeper = tuple(min(count, 2 * (stages - stage)) for stage in range(stages))
            orders = [*orders, (ONE_F_ONE_B.name, deeper)]
        firsts, others = (
            tuple(of_stage[:1] for of_stage in ranks),
            tuple(of_stage[1:] for of_stage in ranks),
        )
        for order in dict.fromkeys(orders):
            choice = Choice(Layout(partition, firsts), size, *order, backward_ranks=others)
            yield self.plan(choice)

    def _costs_of(self, choice: Choice, *, splits: bool) -> Sequence[StageCost]:
        """Costs of every stage; if micro-batches are split, with speed and peaks of the replica
        that has the largest part."""
        size, replicas, partition = choice.size, choice.replicas, choice.layout.partition
        costs = self.costs(partition, size, splits=splits)
        if max(replicas) == 1 and not self.request.shard_optimizer:
            return costs
        shared = []
        memory = self.footprint(partition).memory
        optimizer = self.profile.optimizer_cost
        state = optimizer.state_bytes_per_parameter_byte
        for stage, (cost, count) in enumerate(zip(costs, replicas, strict=True)):
            if choice.replication is Replication.SPLIT:
                samples = ceil(size / count)
                part = self.costs(partition, samples, splits=splits)[stage]
                factor = size / samples
                cost = replace(
                    cost,
                    forward_s=part.forward_s * factor,
                    backward_s=part.backward_s * factor,
                    weight_s=None if part.weight_s is None else part.weight_s * factor,
                    peaks=part.peaks,
                )
            if self.request.shard_optimizer:
                updated = memory[stage].updated_bytes(count)
                update_s = optimizer.step_s_per_byte * updated
                cost = replace(cost, optimizer_bytes=ceil(state * updated), update_s=update_s)
            shared.append(cost)
        return shared
