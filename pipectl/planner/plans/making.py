"""Plans made anew from stages that are known, at any size and in any order, on any ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Replication
from pipectl.planner.assumptions import assumptions_of
from pipectl.planner.plans.replica_costs import Members, ReplicaChoice, ReplicaPlans, members_of
from pipectl.planner.request import PlanRequest, open_orders
from pipectl.profile import Profile
from pipectl.schedule.interleaved import INTERLEAVED
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B
from pipectl.schedule.order import Shape


class Maker:
    """Makes plans without replicas and without predictions."""

    def __init__(self, profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
        self._request = request
        self._profile = profile
        assumptions = assumptions_of(profile, cluster)
        self._plans = ReplicaPlans(profile, cluster, request, assumptions)

    def members(self, plan: Plan) -> Members:
        """Operator indices of a plan's stages."""
        return members_of(self._profile, (stage.nodes for stage in plan.stages))

    def flushed(
        self, members: Members, ranks: Sequence[tuple[int, ...]], size: int
    ) -> Iterator[Plan]:
        """With every schedule and warm-up that is open.

        Where backwards have ranks of their own, one more micro-batch is in flight between the two
        ranks of a stage.

        Args:
            ranks: of each stage: one, or that of its forward and that of its backward.
        """
        stages, count = len(members), ceil(self._request.batch_size / size)
        orders = open_orders(self._request, stages, count)
        if max(map(len, ranks)) > 1 and self._request.warm_up is None:
            more = (min(count, 2 * (stages - stage)) for stage in range(stages))
            orders += [(ONE_F_ONE_B.name, tuple(more))] * (
                self._request.schedule in (None, ONE_F_ONE_B.name)
            )
        for schedule, warm_up in dict.fromkeys(orders):
            yield self._made(members, ranks, size, schedule, warm_up)

    def interleaved(self, members: Members, ranks: int, size: int) -> Plan:
        """Stage s on rank s mod ``ranks``."""
        stages, count = len(members), ceil(self._request.batch_size / size)
        around = [(stage % ranks,) for stage in range(stages)]
        (warm_up,) = INTERLEAVED.warm_ups(Shape(stages, ranks, count))
        return self._made(members, around, size, INTERLEAVED.name, warm_up)

    def _made(
        self,
        members: Members,
        ranks: Sequence[tuple[int, ...]],
        size: int,
        schedule: str,
        warm_up: tuple[int, ...],
    ) -> Plan:
        firsts = tuple(held[:1] for held in ranks)
        choice = ReplicaChoice(members, firsts, size, Replication.WHOLE, schedule, warm_up)
        plan = self._plans.plan(choice)
        stages = zip(plan.stages, ranks, strict=True)
        moved = (replace(stage, backward_ranks=held[1:]) for stage, held in stages)
        return replace(plan, stages=tuple(moved))
