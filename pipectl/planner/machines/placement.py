"""Which rank holds which stage. Among equal devices stages go to ranks in rising order, so
neighbours stay close."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby, islice

from pipectl.cluster import Cluster
from pipectl.planner.machines.devices import Pool

Placement = tuple[int, ...]
"""Rank of every stage."""
_MOST_NODES = 8
"""More stages have too many placements to try them all."""


def placements(cluster: Cluster, devices: Sequence[Pool], kinds: Sequence[int]) -> list[Placement]:
    """Ways to put stages on ranks: node by node, and spread so that nodes share no core.

    Two nodes of two ranks and one core each, two stages::

        node by node   (0, 1)   fewest messages between nodes
        spread         (0, 2)   each stage has a core

    Args:
        kinds: of the device of every stage.
    """
    counts = [list(kinds).count(kind) for kind in range(len(devices))]
    node_by_node = [pool.ranks[:count] for pool, count in zip(devices, counts, strict=True)]
    spread = [_spread(cluster, pool, n) for pool, n in zip(devices, counts, strict=True)]
    return list(dict.fromkeys([_in_turn(kinds, node_by_node), _in_turn(kinds, spread)]))


def _in_turn(kinds: Sequence[int], ranks: Sequence[Sequence[int]]) -> Placement:
    """Each stage gets the next rank of its kind."""
    left = [iter(members) for members in ranks]
    return tuple(next(left[kind]) for kind in kinds)


def _spread(cluster: Cluster, pool: Pool, stages: int) -> Placement:
    """Each stage in turn to the node that then has the fewest stages per core."""
    members = groupby(pool.ranks, key=cluster.node_of_rank.__getitem__)
    ranks = {node: list(found) for node, found in members}
    held = dict.fromkeys(ranks, 0)
    queue = [(1 / cluster.nodes[node].cores, node) for node in ranks]
    heapify(queue)
    for _ in range(stages):
        _, node = heappop(queue)
        held[node] += 1
        if held[node] < len(ranks[node]):
            heappush(queue, ((held[node] + 1) / cluster.nodes[node].cores, node))
    return tuple(rank for node in ranks for rank in ranks[node][: held[node]])


def every_placement(cluster: Cluster, stages: int, most: int) -> list[Placement]:
    """All placements that differ, or none if there are more than ``most``.

    Ranks of a node are alike, and so are equal nodes.
    """

    twins = _twins_before(cluster)

    def extend(nodes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(nodes) == stages:
            yield nodes
            return
        for node, place in enumerate(cluster.nodes):
            if nodes.count(node) < place.ranks and twins[node].issubset(nodes):
                yield from extend((*nodes, node))

    if stages > _MOST_NODES:
        return []
    found = list(islice(extend(()), most + 1))
    return (
        [_in_turn(nodes, _ranks_by_node(cluster)) for nodes in found] if len(found) <= most else []
    )


def _twins_before(cluster: Cluster) -> list[set[int]]:
    """For every node the earlier ones that are just like it."""
    alike: dict[object, list[int]] = {}
    found = []
    for place, node in enumerate(cluster.nodes):
        device = node.device
        kind = node.ranks, node.cores, device.speed, device.memory_bytes, node.switch
        found.append(set(alike.setdefault(kind, [])))
        alike[kind].append(place)
    return found


def _ranks_by_node(cluster: Cluster) -> list[list[int]]:
    ranks: list[list[int]] = [[] for _ in cluster.nodes]
    for rank, node in enumerate(cluster.node_of_rank):
        ranks[node].append(rank)
    return ranks
