"""All that can be chosen besides the cuts: replicas, ranks, micro-batches and orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Replication
from pipectl.planner.exploring.areas import most_micro_batches
from pipectl.planner.hybrid.placing import consecutive
from pipectl.planner.machines.placement import every_placement
from pipectl.planner.replication.copies import share_of_one_copy, size_together
from pipectl.planner.replication.replicated import (
    MICRO_BATCHES_PER_RANK,
    most_at_work,
    replica_orders,
)
from pipectl.planner.request import Order, PlanRequest, micro_batch_sizes, open_orders
from pipectl.profile import Profile
from pipectl.schedule.one_f_one_b import policy_a, policy_b

MOST_PLACEMENTS = 200


@dataclass(frozen=True)
class Arrangement:
    """Everything but the cuts and the order.

    Args:
        ranks: of every stage, one a replica.
        size: samples of a micro-batch.
    """

    ranks: tuple[tuple[int, ...], ...]
    size: int
    replication: Replication

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of every stage."""
        return tuple(map(len, self.ranks))


def arrangements(
    profile: Profile, cluster: Cluster, request: PlanRequest, blocks: int
) -> Iterator[Arrangement] | None:
    """All that differ; None if there are too many placements. Equal ranks are not told apart."""
    vectors = list(_replicas(request, cluster.ranks, blocks))
    places = {
        units: every_placement(cluster, units, MOST_PLACEMENTS) for units in set(map(sum, vectors))
    }
    if not all(places.values()):
        return None
    return (
        Arrangement(consecutive(replicas, flat), size, replication)
        for replicas in vectors
        for replication in _replications(request, replicas)
        for size in _sizes(profile, cluster, request, replicas, replication)
        for flat in places[sum(replicas)]
    )


def orders_of(request: PlanRequest, arrangement: Arrangement) -> list[Order]:
    """Schedules and warm-ups of an arrangement.

    Without replicas and with whole micro-batches: the two policies and GPipe. With split ones all
    warm-ups from the one policy to the other, among which the search chooses, and GPipe.
    """
    replicas = arrangement.replicas
    stages, count = len(replicas), ceil(request.batch_size / arrangement.size)
    if max(replicas) == 1:
        return open_orders(request, stages, count)
    if arrangement.replication is Replication.WHOLE:
        return replica_orders(replicas, arrangement.replication, arrangement.size, request)
    between = _between(policy_a(stages, count), policy_b(stages, count))
    return open_orders(request, stages, count, list(between))


def _between(least: Sequence[int], most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Warm-ups that never rise."""
    ranges = [range(low, high + 1) for low, high in zip(least, most, strict=True)]
    for warm_up in product(*ranges):
        if all(early >= late for early, late in pairwise(warm_up)):
            yield warm_up


def _replicas(request: PlanRequest, ranks: int, blocks: int) -> Iterator[tuple[int, ...]]:
    """Numbers of replicas of all stages."""
    fixed = request.fixed_stages
    counts = range(1, min(ranks, blocks) + 1) if fixed is None else [fixed]
    for stages in counts:
        if request.replicas is not None:
            if stages * request.replicas <= ranks:
                yield (request.replicas,) * stages
            continue
        most = ranks - stages + 1
        for found in product(range(1, most + 1), repeat=stages):
            if sum(found) <= ranks:
                yield found


def _replications(request: PlanRequest, replicas: Sequence[int]) -> tuple[Replication, ...]:
    return request.replications if max(replicas) > 1 else (Replication.WHOLE,)


def _sizes(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    replicas: Sequence[int],
    replication: Replication,
) -> list[int]:
    """Micro-batch sizes; replicas without any work would only cost time."""
    most = max(replicas)
    if request.replicas is None and most > 1:
        found = micro_batch_sizes(request, MICRO_BATCHES_PER_RANK * cluster.ranks)
        if replication is Replication.WHOLE and request.micro_batches is None:
            found = [ceil(size / count) for size in found for count in range(1, most + 1)]
    else:
        alone = _sizes_of_copies(profile, request, len(replicas))
        found = [size_together(size, request, most, replication) for size in alone]
    busy = {size for size in found if most_at_work(size, replication, request) >= most}
    return sorted(busy, reverse=True)


def _sizes_of_copies(profile: Profile, request: PlanRequest, stages: int) -> list[int]:
    """Micro-batch sizes of one copy of a pipeline for its share of the samples."""
    alone = share_of_one_copy(request, request.replicas or 1)
    return micro_batch_sizes(alone, most_micro_batches(profile, stages))
