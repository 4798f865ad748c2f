"""A lower bound on the largest load: some stage must hold each block, whatever else it holds.

The smallest load of any set of blocks with a given one is a minimum cut, because compute and
crossing values are a submodular function of the set::

    block ──compute──► sink      blocks of a value ──∞──► in ──transfer──► out ──∞──► all of them

A cut pays the compute of a block on the source's side, and a value's transfer if the source's side
has some, but not all of its blocks. That the set is convex, or fits into memory, is not asked, so
the bound holds with and without. Where transfers weigh more than compute it often equals the
optimum. The minimum cut is a maximum flow (Dinic); arcs come in pairs, there and back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled
from pipectl.planner.balance.load_model import TOLERANCE, LoadModel


def stage_bound_s(model: LoadModel, enough_s: float, expired: Callable[[], bool]) -> float:
    """Seconds that the largest load of any partition is not below.

    Blocks that alone would be a large stage come first; the search ends with those that alone are
    below what was found, once ``enough_s`` is reached, or when time is up.
    """
    alone = model.compute_s.copy()
    moves = model.moves
    transfers = np.repeat(moves.transfer_s, np.diff(moves.users_at))
    np.add.at(alone, moves.users, transfers)
    network = _Network(model)
    bound_s = 0.0
    for block in np.argsort(-alone, kind="stable"):
        if alone[block] <= bound_s or bound_s >= enough_s or expired():
            break
        bound_s = max(bound_s, network.least_load_s(int(block)))
    return bound_s


class _Network:
    """The flow network of one model."""

    def __init__(self, model: LoadModel) -> None:
        moves = model.moves
        blocks, values = len(model), len(moves.transfer_s)
        value_of = np.repeat(np.arange(values), np.diff(moves.users_at))
        into, out = blocks + 2 * value_of, blocks + 2 * value_of + 1
        self._sink = blocks + 2 * values
        every, users = np.arange(blocks), moves.users
        inner = blocks + 2 * np.arange(values)
        source = np.concatenate([every, users, out, inner])
        target = np.concatenate([np.full(blocks, self._sink), into, users, inner + 1])
        endless_s = 1.0 + model.compute_s.sum() + moves.transfer_s.sum()
        endless = np.full(len(users), endless_s)
        forth = np.concatenate([model.compute_s, endless, endless, moves.transfer_s])
        self._room = np.stack([forth, np.zeros_like(forth)], axis=1).ravel()
        self._target = np.stack([target, source], axis=1).ravel().astype(np.int64)
        tails = np.stack([source, target], axis=1).ravel()
        self._arcs = np.argsort(tails, kind="stable").astype(np.int64)
        self._heads = np.searchsorted(tails[self._arcs], np.arange(self._sink + 2)).astype(np.int64)
        self._least = endless_s * 1e-15

    def least_load_s(self, block: int) -> float:
        """Seconds that no stage with this block is below."""
        heads, arcs, target = self._heads, self._arcs, self._target
        flow = _maximum_flow(block, self._sink, heads, arcs, target, self._room.copy(), self._least)
        return flow * (1 - TOLERANCE / 10)


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
    amount = np.inf
    for step in range(depth):
        amount = min(amount, room[path[step]])
    first = depth
    for step in range(depth - 1, -1, -1):
        room[path[step]] -= amount
        room[path[step] ^ 1] += amount
        if room[path[step]] <= least:
            first = step
    return amount, first


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
    """Send along shortest ways until none is left."""
    following[:] = head_at[:-1]
    sent = 0.0
    depth = 0
    node = source
    while True:
        if node == sink:
            amount, depth = _send(path, depth, room, least)
            sent += amount
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
def _maximum_flow(
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
