"""Plans from choices: the one place in which the planner puts a plan together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Replication, Stage, StageCost
from pipectl.planner.assumptions import assumptions_of, size_assumptions
from pipectl.planner.costs.footprint import Footprint, Footprints
from pipectl.planner.costs.operator_times import OperatorTimes
from pipectl.planner.costs.stage_costs import scaled_transfers, stage_costs
from pipectl.planner.costs.stage_memory import StageTable
from pipectl.planner.request import PlanRequest, open_orders
from pipectl.profile import Profile
from pipectl.schedule import default_warm_up
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B

Members = tuple[tuple[int, ...], ...]
"""Indices of the operators of every stage, ascending."""
Ranks = tuple[tuple[int, ...], ...]
"""The ranks of every stage."""


@dataclass(frozen=True)
class Choice:
    """Everything a plan decides.

    Args:
        ranks: of every stage, one per replica.
        size: samples of a micro-batch.
        replication: how replicas share the work.
        recompute: whether each stage computes its forward again for its backward; empty if none.
        backward_ranks: where the backward of each stage runs, if elsewhere; empty if none does.
    """

    members: Members
    ranks: Ranks
    size: int
    schedule: str
    warm_up: tuple[int, ...]
    replication: Replication = Replication.WHOLE
    recompute: tuple[bool, ...] = ()
    backward_ranks: Ranks = ()

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of every stage."""
        return tuple(map(len, self.ranks))


class PlanBuilder:
    """Makes plans, without predictions, of one request; what several share is computed once."""

    def __init__(self, profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
        self.profile = profile
        self.cluster = cluster
        self.request = request
        self.times = OperatorTimes(profile)
        self._footprints = Footprints(profile)
        self._parts: dict[Members, Footprint] = {}
        self._tables: dict[tuple[Members, int], StageTable] = {}

    @cached_property
    def assumptions(self) -> tuple[str, ...]:
        """What neither the profile nor the cluster says."""
        return assumptions_of(self.profile, self.cluster)

    def members(self, stages: Iterable[Iterable[str]]) -> Members:
        """Indices of operators that are given by their ids, stage by stage."""
        index_of = self.profile.index_of
        return tuple(tuple(sorted(index_of[node] for node in nodes)) for nodes in stages)

    def table(self, members: Members, size: int) -> StageTable:
        """Costs of stages with one replica each, and the messages between them."""
        if (members, size) not in self._tables:
            parts, scale = self._footprint(members), size / self.profile.micro_batch_size
            costs = stage_costs(parts, self.times.at(size), scale, self.profile)
            self._tables[members, size] = StageTable(costs, scaled_transfers(parts, scale))
        return self._tables[members, size]

    def plan(self, choice: Choice) -> Plan:
        """The plan of a choice."""
        request, size = self.request, choice.size
        count = len(choice.members)
        again = choice.recompute or (False,) * count
        backward_ranks = choice.backward_ranks or ((),) * count
        nodes, costs = self._footprint(choice.members).nodes, self._costs(choice)
        micro_batches = ceil(request.batch_size / size)
        return Plan(
            name=request.name,
            fingerprint=self.profile.fingerprint,
            schedule=choice.schedule,
            warm_up=choice.warm_up,
            batch_size=request.batch_size,
            micro_batch_size=size,
            micro_batches=micro_batches,
            stages=tuple(
                Stage(inside, ranks, cost, elsewhere, recompute=twice)
                for inside, ranks, cost, elsewhere, twice in zip(
                    nodes, choice.ranks, costs, backward_ranks, again, strict=True
                )
            ),
            transfers=self.table(choice.members, size).transfers,
            node_of_rank=self.cluster.node_of_rank,
            memory_limit_bytes=request.memory_limit_bytes,
            key=request.key,
            offload_to=request.offload_to,
            replication=choice.replication,
            shard_optimizer=request.shard_optimizer,
            assumptions=(
                *self.assumptions,
                *size_assumptions(self.profile, size),
                *other_count(request, micro_batches, size),
            ),
        )

    def stages_in_turn(self, stages: Sequence[Sequence[str]]) -> Plan:
        """Given stages, as operator ids, each on the rank of its number, by 1F1B."""
        request = self.request
        own = ceil(request.batch_size / self.profile.micro_batch_size)
        size = ceil(request.batch_size / (request.micro_batches or own))
        count = ceil(request.batch_size / size)
        warm_up = default_warm_up(ONE_F_ONE_B.name, len(stages), count)
        ranks = tuple((rank,) for rank in range(len(stages)))
        return self.plan(Choice(self.members(stages), ranks, size, ONE_F_ONE_B.name, warm_up))

    def flushed(self, members: Members, ranks: Ranks, size: int) -> Iterator[Plan]:
        """With every schedule and warm-up that is open.

        If backwards have ranks of their own, one more micro-batch is in flight between the two
        ranks of a stage.

        Args:
            ranks: of each stage: one, or that of its forward and that of its backward.
        """
        request = self.request
        stages, count = len(members), ceil(request.batch_size / size)
        orders = open_orders(request, stages, count)
        apart = max(map(len, ranks)) > 1
        if apart and request.warm_up is None and request.schedule in (None, ONE_F_ONE_B.name):
            deeper = tuple(min(count, 2 * (stages - stage)) for stage in range(stages))
            orders = [*orders, (ONE_F_ONE_B.name, deeper)]
        firsts, others = tuple(held[:1] for held in ranks), tuple(held[1:] for held in ranks)
        for order in dict.fromkeys(orders):
            yield self.plan(Choice(members, firsts, size, *order, backward_ranks=others))

    def _costs(self, choice: Choice) -> Sequence[StageCost]:
        """Of every stage; of split micro-batches with the speed and the peaks of the replica that
        gets most of one."""
        size, replicas = choice.size, choice.replicas
        costs = self.table(choice.members, size).costs
        if max(replicas) == 1 and not self.request.shard_optimizer:
            return costs
        found = []
        memory = self._footprint(choice.members).memory
        state = self.profile.optimizer_cost.state_bytes_per_parameter_byte
        for stage, (cost, count) in enumerate(zip(costs, replicas, strict=True)):
            if choice.replication is Replication.SPLIT:
                samples = ceil(size / count)
                part, factor = self.table(choice.members, samples).costs[stage], size / samples
                forward_s, backward_s = part.forward_s * factor, part.backward_s * factor
                cost = replace(cost, forward_s=forward_s, backward_s=backward_s, peaks=part.peaks)
            if self.request.shard_optimizer:
                updated = ceil(state * memory[stage].updated_bytes(count))
                cost = replace(cost, optimizer_bytes=updated)
            found.append(cost)
        return found

    def _footprint(self, members: Members) -> Footprint:
        if members not in self._parts:
            self._parts[members] = self._footprints.of(members)
        return self._parts[members]


def other_count(request: PlanRequest, count: int, size: int) -> tuple[str, ...]:
    """Why there are not as many micro-batches as were asked for."""
    if request.micro_batches in (None, count):
        return ()
    copies = request.replicas or 1
    equally = f" and be shared evenly by {copies} replicas" if copies > 1 else ""
    return (
        f"{request.micro_batches} micro-batches of {request.batch_size} samples cannot be of one "
        f"size with a smaller last one{equally}: {count} of {size} samples instead",
    )
