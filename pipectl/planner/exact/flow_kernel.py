"""Maximum flow (Dinic) on graphs whose arcs come in pairs, there and back."""

from __future__ import annotations

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled


@compiled
def _levels(
    source: int,
    head_at: Integers,
    arcs: Integers,
    target: Integers,
    room: Floats,
    least: float,
    level: Integers,
    queue: Integers,
) -> None:
    """Distance of every node from the source along arcs with room; -1 where there is no way."""
    level[:] = -1
    level[source] = 0
    queue[0] = source
    read, written = 0, 1
    while read < written:
        node = queue[read]
        read += 1
        for place in range(head_at[node], head_at[node + 1]):
            arc = arcs[place]
            if room[arc] > least and level[target[arc]] < 0:
                level[target[arc]] = level[node] + 1
                queue[written] = target[arc]
                written += 1


@compiled
def _send(path: Integers, depth: int, room: Floats, least: float) -> tuple[float, int]:
    """Send what a way of so many arcs has room for; also the place of the first arc it uses up."""
    most = np.inf
    for step in range(depth):
        most = min(most, room[path[step]])
    first = depth
    for step in range(depth - 1, -1, -1):
        room[path[step]] -= most
        room[path[step] ^ 1] += most
        if room[path[step]] <= least:
            first = step
    return most, first


@compiled
def _blocking_flow(
    source: int,
    sink: int,
    head_at: Integers,
    arcs: Integers,
    target: Integers,
    room: Floats,
    least: float,
    level: Integers,
    following: Integers,
    path: Integers,
) -> float:
    """Send along shortest ways until none is left; arc ``2i + 1`` is ``2i`` back."""
    following[:] = head_at[:-1]
    sent = 0.0
    depth = 0
    node = source
    while True:
        if node == sink:
            most, depth = _send(path, depth, room, least)
            sent += most
            node = target[path[depth] ^ 1]
            continue
        if following[node] < head_at[node + 1]:
            arc = arcs[following[node]]
            if room[arc] > least and level[target[arc]] == level[node] + 1:
                path[depth] = arc
                depth += 1
                node = target[arc]
            else:
                following[node] += 1
        elif depth > 0:
            level[node] = -1
            depth -= 1
            node = target[path[depth] ^ 1]
        else:
            return sent


@compiled
def maximum_flow(
    source: int,
    sink: int,
    head_at: Integers,
    arcs: Integers,
    target: Integers,
    room: Floats,
    least: float,
) -> float:
    """The flow from source to sink; ``room`` is what is left of every arc's capacity afterwards.

    Args:
        head_at, arcs: the arcs that leave every node.
        target: of every arc; arc ``2i + 1`` is arc ``2i`` back.
        room: capacities, in and out.
        least: capacities up to this count as used up.
    """
    nodes = len(head_at) - 1
    level = np.empty(nodes, dtype=np.int64)
    queue = np.empty(nodes, dtype=np.int64)
    following = np.empty(nodes, dtype=np.int64)
    path = np.empty(nodes + 1, dtype=np.int64)
    flow = 0.0
    while True:
        _levels(source, head_at, arcs, target, room, least, level, queue)
        if level[sink] < 0:
            return flow
        flow += _blocking_flow(
            source, sink, head_at, arcs, target, room, least, level, following, path
        )
