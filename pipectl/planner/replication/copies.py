"""Copies of a whole pipeline: as many replicas of every stage, each with its share of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError
from pipectl.plan import Plan, Replication
from pipectl.planner.machines.other_clusters import with_ranks
from pipectl.planner.plans.replica_costs import ReplicaChoice, members_of
from pipectl.planner.replication.replica_judge import judged
from pipectl.planner.replication.replicated import replica_orders
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile


def one_copy(cluster: Cluster, request: PlanRequest, copies: int) -> tuple[Cluster, PlanRequest]:
    """What one of several copies has for itself: the first ranks, and samples of a step.

    Raises:
        InfeasibleError: more copies than ranks.
    """
    if copies > cluster.ranks:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas of every stage, but only {cluster.ranks} ranks",
            cure="use fewer replicas, or ask for more ranks",
        )
    return with_ranks(cluster, cluster.ranks // copies), share_of_one_copy(request, copies)


def share_of_one_copy(request: PlanRequest, copies: int) -> PlanRequest:
    """The samples and micro-batches of one of several copies."""
    batches = request.micro_batches
    return replace(
        request,
        replicas=1,
        batch_size=ceil(request.batch_size / copies),
        micro_batches=None if batches is None else ceil(batches / copies),
    )


def copied_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    alone: Sequence[Plan],
    copies: int,
) -> list[Plan]:
    """Plans of all copies together, with predictions, fastest first.

    Args:
        alone: plans of one copy; see :func:`one_copy`.

    Raises:
        InfeasibleError: none fits.
    """
    choices = (choice for plan in alone for choice in _copied(profile, plan, request, copies))
    found = judged(profile, cluster, request, choices)
    if not found:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas of every stage take too much memory",
            cure="use fewer replicas, so that every pipeline has more ranks",
        )
    return found


def _copied(
    profile: Profile, plan: Plan, request: PlanRequest, copies: int
) -> Iterator[ReplicaChoice]:
    """With replicas that are neighbours, and with copies one behind the other."""
    members = members_of(profile, (stage.nodes for stage in plan.stages))
    firsts = [stage.ranks[0] for stage in plan.stages]
    together = tuple(tuple(first * copies + copy for copy in range(copies)) for first in firsts)
    apart = tuple(tuple(first + copy * plan.ranks for copy in range(copies)) for first in firsts)
    for ranks in (together, apart):
        for way in request.replications:
            size = plan.micro_batch_size * (copies if way is Replication.SPLIT else 1)
            for schedule, warm_up in replica_orders((copies,) * len(firsts), way, size, request):
                yield ReplicaChoice(members, ranks, size, way, schedule, warm_up)
