"""Partitions of a graph for measuring: windows of a bounded size, and random stages."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from pipectl.capture import CapturedGraph

_FEWEST, _MOST = 2, 6


def whole(graph: CapturedGraph) -> dict[str, int]:
    """Everything in one stage."""
    return {node.name: 0 for node in graph.operators}


def windows(graph: CapturedGraph, sizes: Mapping[str, float], most: float) -> dict[str, int]:
    """Runs of neighbouring operators with at most ``most`` in all, where groups allow.

    Args:
        sizes: of every operator, in any unit.
    """
    held = 0.0
    borders: list[int] = []
    allowed = set(_borders(graph))
    for index, node in enumerate(graph.operators):
        size = sizes[node.name]
        if index in allowed and held and held + size > most:
            borders.append(index)
            held = 0.0
        held += size
    return _stages(graph, borders)


def random_stages(graph: CapturedGraph, seed: int) -> dict[str, int]:
    """2 to 6 runs of neighbouring operators, parted anywhere that groups allow."""
    draw = random.Random(seed)
    allowed = _borders(graph)
    count = min(draw.randint(_FEWEST, _MOST) - 1, len(allowed))
    return _stages(graph, sorted(draw.sample(allowed, count)))


def _borders(graph: CapturedGraph) -> list[int]:
    """Places between neighbouring operators that part no group."""
    last = {graph.groups.get(node.name): index for index, node in enumerate(graph.operators)}
    closed = -1
    found = []
    for index, node in enumerate(graph.operators):
        if index and index > closed:
            found.append(index)
        group = graph.groups.get(node.name)
        if group is not None:
            closed = max(closed, last[group])
    return found


def _stages(graph: CapturedGraph, borders: Sequence[int]) -> dict[str, int]:
    starts = set(borders)
    stage = 0
    found: dict[str, int] = {}
    for index, node in enumerate(graph.operators):
        stage += index in starts
        found[node.name] = stage
    return found
