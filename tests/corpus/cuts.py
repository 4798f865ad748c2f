"""Random convex cuts of a captured graph."""

from __future__ import annotations

import random

import networkx

from pipectl.capture import CapturedGraph


def random_cut(graph: CapturedGraph, stages: int, seed: int) -> dict[str, int]:
    """A stage for every operator: any order that keeps to the edges and groups, split anywhere.

    Fewer stages come out where the graph has fewer parts that may be apart.
    """
    draw = random.Random(seed)
    parts = _parts(graph)
    order = _random_order(parts, draw)
    stages = min(stages, len(order))
    cuts = sorted(draw.sample(range(1, len(order)), stages - 1))
    stage_of_part = {part: sum(i >= cut for cut in cuts) for i, part in enumerate(order)}
    stage_of = {
        name: stage_of_part[part] for part in order for name in parts.nodes[part]["operators"]
    }
    return {node.name: stage_of[node.name] for node in graph.operators}


def whole(graph: CapturedGraph) -> dict[str, int]:
    """Everything in one stage."""
    return {node.name: 0 for node in graph.operators}


def _parts(graph: CapturedGraph) -> networkx.DiGraph:
    """The graph of what cannot be apart: groups, and whatever lies on a cycle of groups."""
    group_of = {node.name: graph.groups.get(node.name, node.name) for node in graph.operators}
    members: dict[str, list[str]] = {}
    for name, group in group_of.items():
        members.setdefault(group, []).append(name)
    groups = networkx.DiGraph()
    groups.add_nodes_from(members)
    groups.add_edges_from((group_of[a], group_of[b]) for a, b in graph.edges)
    parts = networkx.condensation(groups)
    for part in parts:
        inside = sorted(parts.nodes[part]["members"])
        parts.nodes[part]["operators"] = [name for group in inside for name in members[group]]
    return parts


def _random_order(parts: networkx.DiGraph, draw: random.Random) -> list[int]:
    missing = dict(parts.in_degree())
    ready = sorted(part for part, count in missing.items() if not count)
    order: list[int] = []
    while ready:
        part = ready.pop(draw.randrange(len(ready)))
        order.append(part)
        for user in sorted(parts.successors(part)):
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return order
