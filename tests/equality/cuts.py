"""Random convex cuts of a captured graph."""

from __future__ import annotations

import random

import networkx

from pipectl.capture import CapturedGraph


def random_cut(graph: CapturedGraph, stages: int, seed: int) -> dict[str, int]:
    """A stage for every operator: any order that keeps to the edges and groups, split anywhere.

    Fewer stages come out if the graph has fewer parts that may be apart.
    """
    draw = random.Random(seed)
    group_of = {node.name: graph.groups.get(node.name, node.name) for node in graph.operators}
    groups = networkx.DiGraph()
    groups.add_nodes_from(group_of.values())
    groups.add_edges_from((group_of[a], group_of[b]) for a, b in graph.edges)
    # What lies on a cycle of groups cannot be apart.
    parts = enumerate(networkx.strongly_connected_components(groups))
    part_of_group = {group: part for part, members in parts for group in members}
    part_of = {name: part_of_group[group] for name, group in group_of.items()}
    before: dict[int, set[int]] = {part: set() for part in part_of.values()}
    for source, target in graph.edges:
        if part_of[source] != part_of[target]:
            before[part_of[target]].add(part_of[source])
    position: dict[int, int] = {}
    while len(position) < len(before):
        placed = position.keys()
        ready = [part for part, needs in before.items() if part not in placed and needs <= placed]
        position[draw.choice(ready)] = len(position)
    stages = min(stages, len(position))
    splits = sorted(draw.sample(range(1, len(position)), stages - 1))
    return {
        name: sum(position[part] >= split for split in splits) for name, part in part_of.items()
    }
