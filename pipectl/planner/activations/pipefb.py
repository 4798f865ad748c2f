"""Stages whose backward has a rank of its own (PipeFB): which, and on which ranks.

If some operator takes longer than its share, no cut balances the stages; with the forward on one
rank and the backward on another, what takes longest is the longer of the two, as long as the saved
values of a micro-batch travel in no more time. The dynamic programme cuts stages for that
(:meth:`pipectl.planner.partition.cutter.Cutter.with_backwards_elsewhere`), and the largest stages
of plans that were found without use ranks that are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipectl.cluster import Cluster
from pipectl.plan import Plan


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
