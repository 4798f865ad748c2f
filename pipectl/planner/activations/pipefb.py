"""Stages whose backward has a rank of its own (PipeFB).

Where some operator takes longer than its share, no cut balances the stages; with the forward on one
rank and the backward on another, what takes longest is the longer of the two, as long as the saved
values of a micro-batch travel in no more time. Two ranks take such a stage::

    least ranks(state) = min over earlier states of
        least ranks(earlier) + 1    if forward + backward of the stage between is at most T
        least ranks(earlier) + 2    if the longest of forward, backward and copy is at most T

Where stages may recompute, the longest of both computations and the copy of a stage's inputs is
enough for two ranks, too.

T is bisected until the ranks suffice. The states are downsets of the graph, so the cuts are
convex; bottlenecks are all that counts here, and the simulator judges the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipectl.arrays import Floats
from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.planner.hybrid import States
from pipectl.planner.hybrid.model import costs_of
from pipectl.profile import Profile

ROUNDS = 14
"""Of bisection: T is found to a part in 8,000 of all work."""


@dataclass(frozen=True)
class ApartCut:
    """Stages as operator indices, and which have a backward elsewhere."""

    members: tuple[tuple[int, ...], ...]
    apart: tuple[bool, ...]


@dataclass(frozen=True)
class _Loads:
    """Seconds of one micro-batch by first and last state; infinite where there is no stage."""

    together: Floats
    apart: Floats


def apart_cut(
    profile: Profile,
    cluster: Cluster,
    states: States,
    size: int,
    *,
    every: bool,
    recompute: bool | None = False,
) -> ApartCut | None:
    """Stages of the least bottleneck, on all the ranks; None if there are too few ranks.

    Args:
        every: whether all backwards have ranks of their own.
        recompute: whether these compute forwards once more; None if stage by stage.
    """
    loads = _loads(profile, cluster, states, size, every=every, recompute=recompute)
    low, high = 0.0, 2 * float(loads.apart[0, -1])
    best = _chain(loads, high, cluster.ranks)
    for _ in range(ROUNDS if best is not None else 0):
        cap = (low + high) / 2
        found = _chain(loads, cap, cluster.ranks)
        low, high, best = (cap, high, best) if found is None else (low, cap, found)
    return None if best is None else _cut(states, loads, best, high)


def _loads(
    profile: Profile,
    cluster: Cluster,
    states: States,
    size: int,
    *,
    every: bool,
    recompute: bool | None,
) -> _Loads:
    costs = costs_of(profile, states, size, [1], fractions=False)
    forward = _between(costs.forward_s[0]) + costs.stage_s[0]
    backward = _between(costs.backward_s[0]) + costs.stage_s[1]
    bandwidth = _link_of_pairs(cluster).bandwidth_bytes_per_s
    slow = np.where(states.follows, 0.0, np.inf)
    together = np.full_like(forward, np.inf) if every else forward + backward + slow
    kept = np.maximum(np.maximum(forward, backward), _between(costs.saved_bytes) / bandwidth)
    again = np.maximum(forward + backward, costs.activation_bytes[:, None] / bandwidth)
    apart = np.minimum(kept, again) if recompute is None else again if recompute else kept
    return _Loads(together, apart + slow)


def _link_of_pairs(cluster: Cluster) -> Link:
    """Between the two ranks of a stage, which share a node if any two do."""
    shared = any(node.ranks > 1 for node in cluster.nodes)
    return cluster.within_node if shared else cluster.between_nodes


def _between(sums: Floats) -> Floats:
    return sums[None, :] - sums[:, None]


def _chain(loads: _Loads, cap: float, ranks: int) -> list[int] | None:
    """States from nothing to everything within a cap, on as few ranks as possible."""
    count = len(loads.apart)
    needs = np.full(count, np.inf)
    needs[0] = 0
    before = np.zeros(count, dtype=np.int64)
    for state in range(1, count):
        two = np.where(loads.apart[:, state] <= cap, 2.0, np.inf)
        reached = needs + np.where(loads.together[:, state] <= cap, 1.0, two)
        before[state] = int(np.argmin(reached))
        needs[state] = reached[before[state]]
    if needs[-1] > ranks:
        return None
    chain = [count - 1]
    while chain[-1]:
        chain.append(int(before[chain[-1]]))
    return chain[::-1]


def _cut(states: States, loads: _Loads, chain: Sequence[int], cap: float) -> ApartCut:
    ends = list(pairwise(chain))
    return ApartCut(
        tuple(tuple(states.between(*pair)) for pair in ends),
        tuple(bool(loads.together[pair] > cap) for pair in ends),
    )


def some_apart(plan: Plan, cluster: Cluster, *, every: bool) -> Iterator[tuple[bool, ...]]:
    """Stages of a plan that may use ranks it leaves free: the largest, one or more of them."""
    stages, spare = len(plan.stages), cluster.ranks - len(plan.stages)
    loads = [stage.cost.forward_s + stage.cost.backward_s for stage in plan.stages]
    largest = sorted(range(stages), key=lambda index: (-loads[index], index))
    most = min(stages, spare)
    for count in sorted({most, *(1 << power for power in range(most.bit_length()))}):
        if 0 < count <= most and (count == stages or not every):
            chosen = set(largest[:count])
            yield tuple(index in chosen for index in range(stages))


def ranks_of(apart: Sequence[bool], cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """One rank for each stage, or two, in the same node if one has them."""
    free: list[list[int]] = [[] for _ in cluster.nodes]
    for rank, node in enumerate(cluster.node_of_rank):
        free[node].append(rank)
    found, last = [], 0
    for needs in (1 + alone for alone in apart):
        nodes = [*range(last, len(free)), *range(last)]
        last = next((node for node in nodes if len(free[node]) >= needs), -1)
        if last < 0:  # no node has two
            last = next(node for node in nodes if free[node])
            left = sorted(rank for ranks in free for rank in ranks)
            taken = [free[last][0], next(rank for rank in left if rank != free[last][0])]
        else:
            taken = free[last][:needs]
        free = [[rank for rank in ranks if rank not in taken] for ranks in free]
        found.append(tuple(taken))
    return tuple(found)
