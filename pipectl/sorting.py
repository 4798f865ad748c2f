"""The order of nodes in which each comes after those that it depends on."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


def topological_order(nodes: Sequence[int], arcs: Iterable[tuple[int, int]]) -> list[int]:
    """Return the topological order that always takes the smallest ready node.

    Args:
        nodes: in ascending order.
        arcs: distinct (source, target) pairs; arcs from a node to itself are ignored.

    Returns:
        ``nodes``, without those on a cycle or after one.
    """
    targets: dict[int, list[int]] = {node: [] for node in nodes}
    missing = dict.fromkeys(nodes, 0)
    for source, target in arcs:
        if source != target:
            targets[source].append(target)
            missing[target] += 1
    ready = [node for node in nodes if not missing[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for target in targets[node]:
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, target)
    return order
