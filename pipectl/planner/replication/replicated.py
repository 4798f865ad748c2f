"""Plans in which every stage has as many replicas as serve the step best.

Two searches propose stages and numbers of replicas: the hybrid one, and for very many ranks the
programme for the least bottleneck. Both split every micro-batch over the replicas of a stage.
Replicas that take whole micro-batches in turn do the same work on smaller micro-batches, so a
proposal is tried in the ways that are allowed, the second with the samples that one replica got of
a split micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil, inf

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Replication
from pipectl.planner.assumptions import baseline_bytes
from pipectl.planner.hybrid import ClusterRules, HybridRequest, States, hybrid_plans
from pipectl.planner.hybrid.placing import consecutive
from pipectl.planner.partition.plans import Choice, Members, PlanBuilder
from pipectl.planner.replication import replica_counts
from pipectl.planner.replication.replica_judge import judged
from pipectl.planner.request import Order, PlanRequest, micro_batch_sizes, open_orders
from pipectl.profile import Profile
from pipectl.schedule.one_f_one_b import policy_a, policy_b

MICRO_BATCHES_PER_RANK = 8
PROPOSALS = 8
"""Of the hybrid search, tried in every way."""
MANY_RANKS = 48
"""Beyond, the hybrid search takes too long."""
SIZES = 8
"""Micro-batch sizes that are then tried, the smallest ones."""

Expired = Callable[[], bool]


@dataclass(frozen=True)
class _Proposal:
    """Stages with replicas that share micro-batches of ``size`` samples.

    Args:
        warm_ups: worth trying besides the usual ones.
    """

    members: Members
    ranks: tuple[tuple[int, ...], ...]
    size: int
    warm_ups: tuple[tuple[int, ...], ...] = ()


def replicated_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Expired = lambda: False,
) -> list[Plan]:
    """Plans in which some stage has several replicas, with predictions, fastest first.

    Args:
        expired: asked now and then; once it is true, what was found so far is returned.
    """
    search = _of_few_ranks if cluster.ranks <= MANY_RANKS else _of_many_ranks
    choices = (
        choice
        for proposal in search(profile, cluster, request, expired)
        if max(map(len, proposal.ranks)) > 1
        for choice in _ways(proposal, request)
    )
    return judged(profile, cluster, request, choices, expired)


def replica_orders(
    replicas: Sequence[int],
    replication: Replication,
    size: int,
    request: PlanRequest,
    warm_ups: Sequence[tuple[int, ...]] = (),
) -> list[Order]:
    """Orders to try with stages that have replicas.

    Args:
        replicas: of every stage.
        size: samples of a micro-batch.
        warm_ups: of 1F1B, tried besides those of the two policies.
    """
    stages, count = len(replicas), ceil(request.batch_size / size)
    in_turn = replicas if replication is Replication.WHOLE else None
    policies = (policy(stages, count, in_turn) for policy in (policy_a, policy_b))
    return open_orders(request, stages, count, [*warm_ups, *policies])


def _of_few_ranks(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired
) -> Iterator[_Proposal]:
    states = States.of(profile)
    sizes = tuple(micro_batch_sizes(request, MICRO_BATCHES_PER_RANK * cluster.ranks))
    wanted = HybridRequest(
        request.batch_size,
        sizes,
        keep=PROPOSALS,
        stages=request.fixed_stages,
        shard_optimizer=request.shard_optimizer,
    )
    limit = inf if request.memory_limit_bytes is None else float(request.memory_limit_bytes)
    rules = ClusterRules(cluster, limit, baseline_bytes(profile))
    for plan in hybrid_plans(profile, states, rules, wanted, expired):
        members = tuple(tuple(states.between(*ends)) for ends in pairwise(plan.cuts))
        yield _Proposal(members, plan.ranks, plan.micro_batch_size, (plan.warm_up,))


def _of_many_ranks(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired
) -> Iterator[_Proposal]:
    """Those with the shortest steps, if a step takes its bottleneck for every micro-batch, and
    once more for every stage but one."""
    limit = inf if request.memory_limit_bytes is None else float(request.memory_limit_bytes)
    counts_of = partial(
        replica_counts,
        limit_bytes=limit,
        shard_optimizer=request.shard_optimizer,
        expired=expired,
    )
    found = [
        (one.load_s * (count + len(one.stages) - 1), size, one)
        for size in micro_batch_sizes(request, request.batch_size)[-SIZES:]
        for count in [ceil(request.batch_size / size)]
        for one in counts_of(profile, cluster, size, count)
        if request.fixed_stages in (None, len(one.stages))
    ]
    for _, size, one in sorted(found, key=lambda rated: rated[:2])[:PROPOSALS]:
        yield _Proposal(
            PlanBuilder(profile, cluster, request).members(one.stages),
            consecutive(one.replicas),
            size,
        )


def most_at_work(size: int, way: Replication, request: PlanRequest) -> int:
    """Replicas of a stage that have something to do; more would only cost time.

    Args:
        size: samples of a micro-batch.
    """
    return size if way is Replication.SPLIT else ceil(request.batch_size / size)


def _ways(proposal: _Proposal, request: PlanRequest) -> Iterator[Choice]:
    """A proposal in every way that is allowed."""
    members = proposal.members
    for way in request.replications:
        split = way is Replication.SPLIT
        for size in _sizes(proposal.size, tuple(map(len, proposal.ranks)), request, split=split):
            most = most_at_work(size, way, request)
            ranks = tuple(held[:most] for held in proposal.ranks)
            replicas, warm_ups = tuple(map(len, ranks)), proposal.warm_ups if split else ()
            if max(replicas) == 1:
                continue
            for schedule, warm_up in replica_orders(replicas, way, size, request, warm_ups):
                yield Choice(members, ranks, size, schedule, warm_up, way)


def _sizes(size: int, replicas: Sequence[int], request: PlanRequest, *, split: bool) -> list[int]:
    if split or request.micro_batches is not None:
        return [size]
    return sorted({ceil(size / count) for count in replicas}, reverse=True)
