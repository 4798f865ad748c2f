"""Copies of a whole pipeline: as many replicas of every stage, each with its share of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError
from pipectl.plan import Plan, Replication
from pipectl.planner.explain.what_if import with_ranks
from pipectl.planner.partition.plans import Choice, PlanBuilder
from pipectl.planner.replication.replica_judge import judged
from pipectl.planner.replication.replicated import replica_orders
from pipectl.planner.request import PLACED, Order, PlanRequest
from pipectl.planner.techniques.placed import placed_orders
from pipectl.profile import Profile


def one_copy(
    profile: Profile, cluster: Cluster, request: PlanRequest, copies: int
) -> tuple[Profile, Cluster, PlanRequest]:
    """What one of several copies has for itself: the first ranks, and samples of a step.

    Where copies share out the optimizer's state, the profile has an even share of it.

    Raises:
        InfeasibleError: more copies than ranks.
    """
    if copies > cluster.ranks:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas of every stage, but only {cluster.ranks} ranks",
            cure="use fewer replicas, or ask for more ranks",
        )
    held = _with_shared_state(profile, copies) if request.shard_optimizer else profile
    return held, with_ranks(cluster, cluster.ranks // copies), share_of_one_copy(request, copies)


def _with_shared_state(profile: Profile, copies: int) -> Profile:
    optimizer = profile.optimizer_cost
    state = optimizer.state_bytes_per_parameter_byte / copies
    return replace(profile, optimizer=replace(optimizer, state_bytes_per_parameter_byte=state))


def share_of_one_copy(request: PlanRequest, copies: int) -> PlanRequest:
    """The samples and micro-batches of one of several copies."""
    batches = request.micro_batches
    return replace(
        request,
        replicas=1,
        batch_size=ceil(request.batch_size / copies),
        micro_batches=None if batches is None else ceil(batches / copies),
    )


def size_together(size: int, request: PlanRequest, copies: int, way: Replication) -> int:
    """Samples of a micro-batch of all copies, where one copy alone has ``size``."""
    if way is Replication.WHOLE:
        return size
    if request.micro_batches is None:
        return size * copies
    return max(copies, ceil(request.batch_size / request.micro_batches))


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
    choices = (
        choice for plan in alone for choice in _copied(profile, cluster, plan, request, copies)
    )
    found = judged(profile, cluster, request, choices)
    if not found:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas of every stage take too much memory",
            cure="use fewer replicas, so that every pipeline has more ranks",
        )
    return found


def _copied(
    profile: Profile, cluster: Cluster, plan: Plan, request: PlanRequest, copies: int
) -> Iterator[Choice]:
    """With replicas that are neighbours, and with copies one behind the other."""
    members = PlanBuilder(profile, cluster, request).members(stage.nodes for stage in plan.stages)
    firsts = [stage.ranks[0] for stage in plan.stages]
    together = tuple(tuple(first * copies + copy for copy in range(copies)) for first in firsts)
    apart = tuple(tuple(first + copy * plan.ranks for copy in range(copies)) for first in firsts)
    for ranks in (together, apart):
        for way in request.replications:
            size = size_together(plan.micro_batch_size, request, copies, way)
            for schedule, warm_up in _orders(plan, request, copies, way, size):
                yield Choice(members, ranks, size, schedule, warm_up, way)


def _orders(
    plan: Plan, request: PlanRequest, copies: int, way: Replication, size: int
) -> list[Order]:
    """Orders to try of copies of a plan, in micro-batches of ``size`` samples."""
    replicas = (copies,) * len(plan.stages)
    if request.schedule not in PLACED:
        return replica_orders(replicas, way, size, request)
    in_turn = replicas if way is Replication.WHOLE else None
    return placed_orders(plan, request, ceil(request.batch_size / size), in_turn)
