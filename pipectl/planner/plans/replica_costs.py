"""What stages with replicas cost, and the plans they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Replication, Stage, StageCost
from pipectl.planner.assumptions import size_assumptions
from pipectl.planner.costs.footprint import Footprint, Footprints
from pipectl.planner.costs.operator_times import operator_times
from pipectl.planner.costs.stage_costs import scaled_transfers, stage_costs
from pipectl.planner.plans.new_plan import new_plan
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile

Members = tuple[tuple[int, ...], ...]
"""Indices of the operators of every stage, ascending."""


def members_of(profile: Profile, stages: Iterable[Iterable[str]]) -> Members:
    """Indices of operators that are given by their ids, stage by stage."""
    return tuple(tuple(sorted(profile.index_of[node] for node in nodes)) for nodes in stages)


@dataclass(frozen=True)
class ReplicaChoice:
    """Stages with replicas, and how they work.

    Args:
        ranks: of every stage, one a replica.
        size: samples of a micro-batch.
    """

    members: Members
    ranks: tuple[tuple[int, ...], ...]
    size: int
    replication: Replication
    schedule: str
    warm_up: tuple[int, ...]

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of every stage."""
        return tuple(map(len, self.ranks))


class ReplicaPlans:
    """Makes plans of choices; stages that several of them share are looked at once.

    Args:
        assumptions: that all plans rest on.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        request: PlanRequest,
        assumptions: Sequence[str] = (),
    ) -> None:
        self._profile = profile
        self._cluster = cluster
        self._request = request
        self._assumptions = tuple(assumptions)
        self._footprints = Footprints(profile)
        self._parts: dict[Members, Footprint] = {}
        self._costs: dict[tuple[Members, int], tuple[StageCost, ...]] = {}

    def plan(self, choice: ReplicaChoice) -> Plan:
        """The plan of a choice, without prediction."""
        parts = self._footprint(choice.members)
        stages = zip(parts.nodes, choice.ranks, self._stage_costs(choice), strict=True)
        plan = new_plan(
            self._profile,
            self._cluster,
            self._request,
            (Stage(nodes, ranks, cost) for nodes, ranks, cost in stages),
            scaled_transfers(parts, self._scale(choice.size)),
            (choice.schedule, choice.warm_up),
            choice.size,
            (*self._assumptions, *size_assumptions(self._profile, choice.size)),
        )
        shared = self._request.shard_optimizer
        return replace(plan, replication=choice.replication, shard_optimizer=shared)

    def _stage_costs(self, choice: ReplicaChoice) -> list[StageCost]:
        found = self._costs_of_replicas(choice)
        if not self._request.shard_optimizer:
            return found
        state = self._profile.optimizer_cost.state_bytes_per_parameter_byte
        memory = self._footprint(choice.members).memory
        return [
            replace(cost, optimizer_bytes=ceil(state * held.updated_bytes(count)))
            for cost, held, count in zip(found, memory, choice.replicas, strict=True)
        ]

    def _costs_of_replicas(self, choice: ReplicaChoice) -> list[StageCost]:
        whole = self._costs_of(choice.members, choice.size)
        if choice.replication is Replication.WHOLE:
            return list(whole)
        return [
            self._shared(choice, index, cost, count)
            for index, (cost, count) in enumerate(zip(whole, choice.replicas, strict=True))
        ]

    def _shared(self, choice: ReplicaChoice, index: int, cost: StageCost, count: int) -> StageCost:
        """A micro-batch at the speed and with the peaks of the replica that gets most of it."""
        samples = ceil(choice.size / count)
        part = self._costs_of(choice.members, samples)[index]
        factor = choice.size / samples
        forward_s, backward_s = part.forward_s * factor, part.backward_s * factor
        return replace(cost, forward_s=forward_s, backward_s=backward_s, peaks=part.peaks)

    def _costs_of(self, members: Members, size: int) -> tuple[StageCost, ...]:
        if (members, size) not in self._costs:
            times = operator_times(self._profile, size)
            found = stage_costs(self._footprint(members), times, self._scale(size), self._profile)
            self._costs[members, size] = found
        return self._costs[members, size]

    def _footprint(self, members: Members) -> Footprint:
        if members not in self._parts:
            self._parts[members] = self._footprints.of(members)
        return self._parts[members]

    def _scale(self, size: int) -> float:
        return size / self._profile.micro_batch_size
