"""Which rank holds which stage. Stages go to ranks in rising order, so neighbours stay close."""

from __future__ import annotations

from pipectl.cluster import Cluster

Placement = tuple[int, ...]
"""Rank of every stage."""


def placements(cluster: Cluster, stages: int) -> list[Placement]:
    """Ways to put stages on ranks: node by node, and spread so that nodes share no core.

    Two nodes of two ranks and one core each, two stages::

        node by node   (0, 1)   fewest messages between nodes
        spread         (0, 2)   each stage has a core
    """
    return list(dict.fromkeys([tuple(range(stages)), _spread(cluster, stages)]))


def _spread(cluster: Cluster, stages: int) -> Placement:
    """Each stage in turn to the node that then has the fewest stages per core."""
    held = [0] * len(cluster.nodes)
    for _ in range(stages):
        free = [index for index, node in enumerate(cluster.nodes) if held[index] < node.ranks]
        held[
            min(free, key=lambda index: ((held[index] + 1) / cluster.nodes[index].cores, index))
        ] += 1
    first = 0
    ranks: list[int] = []
    for count, node in zip(held, cluster.nodes, strict=True):
        ranks += range(first, first + count)
        first += node.ranks
    return tuple(ranks)
