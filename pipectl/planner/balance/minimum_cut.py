"""A lower bound on the largest stage load, from a minimum cut for each block.

The smallest load of any set of blocks with a given one is a minimum cut, because compute and
crossing values are a submodular function of the set::

    block ──compute──► sink      blocks of a value ──∞──► in ──transfer──► out ──∞──► all of them

A cut pays the compute of each block on the source's side, and the transfer of each value that has
some but not all of its blocks there. The set need not be convex, nor fit into memory, so the bound
holds with and without these constraints. If transfers outweigh compute, it often equals the
optimum. The minimum cut is computed as a maximum flow (Dinic); arcs come in pairs, there and back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled
from pipectl.planner.balance.load_model import TOLERANCE, LoadModel


class Network(NamedTuple):
    """A flow network.

    Args:
        head_at, arcs: the arcs that leave node n are ``arcs[head_at[n]:head_at[n + 1]]``.
        target: of every arc; arc ``2i + 1`` is arc ``2i`` back.
        room: residual capacity of every arc.
        least: residual capacity up to this counts as zero.
    """

    head_at: Integers
    arcs: Integers
    target: Integers
    room: Floats
    least: float


def stage_bound_s(model: LoadModel, enough_s: float, expired: Callable[[], bool]) -> float:
    """Lower bound on the largest load of any partition, in seconds.

    Tries blocks in descending order of the load of a stage of this block alone, until this load is
    at most the bound so far, the bound is at least ``enough_s``, or time is up.
    """
    alone, moves = model.compute_s.copy(), model.moves
    transfers = np.repeat(moves.transfer_s, np.diff(moves.users_at))
    np.add.at(alone, moves.users, transfers)
    network = _network(model)
    bound_s, sink = 0.0, len(network.head_at) - 2
    notes = np.zeros((4, sink + 2), dtype=np.int64)
    for block in np.argsort(-alone, kind="stable"):
        if alone[block] <= bound_s or bound_s >= enough_s or expired():
            break
        fresh = network._replace(room=network.room.copy())
        # float: interpreted kernels return numbers of NumPy, which JSON does not know
        flow_s = float(_maximum_flow(fresh, int(block), sink, notes)) * (1 - TOLERANCE / 10)
        bound_s = max(bound_s, flow_s)
    return bound_s


def _network(model: LoadModel) -> Network:
    """Blocks, two nodes per value, and the sink."""
    moves = model.moves
    blocks, values = len(model), len(moves.transfer_s)
    value_of = np.repeat(np.arange(values), np.diff(moves.users_at))
    into, out = blocks + 2 * value_of, blocks + 2 * value_of + 1
    sink, every, users = blocks + 2 * values, np.arange(blocks), moves.users
    inner = blocks + 2 * np.arange(values)
    source = np.concatenate([every, users, out, inner])
    target = np.concatenate([np.full(blocks, sink), into, users, inner + 1])
    endless_s = 1.0 + model.compute_s.sum() + moves.transfer_s.sum()
    endless = np.full(len(users), endless_s)
    forth = np.concatenate([model.compute_s, endless, endless, moves.transfer_s])
    tails = np.stack([source, target], axis=1).ravel()
    arcs = np.argsort(tails, kind="stable").astype(np.int64)
    return Network(
        head_at=np.searchsorted(tails[arcs], np.arange(sink + 2)).astype(np.int64),
        arcs=arcs,
        target=np.stack([target, source], axis=1).ravel().astype(np.int64),
        room=np.stack([forth, np.zeros_like(forth)], axis=1).ravel(),
        least=float(endless_s * 1e-15),
    )


@compiled
def _levels(network: Network, source: int, level: Integers, queue: Integers) -> None:
    """Distance of every node from the source along arcs with room; -1 if there is no path."""
    for node in range(len(level)):
        level[node] = -1
    level[source] = 0
    queue[0] = source
    read, written = 0, 1
    while read < written:
        node = queue[read]
        read += 1
        for place in range(network.head_at[node], network.head_at[node + 1]):
            arc = network.arcs[place]
            target = network.target[arc]
            if network.room[arc] > network.least and level[target] < 0:
                level[target] = level[node] + 1
                queue[written] = target
                written += 1


@compiled
def _send(network: Network, path: Integers, depth: int) -> tuple[float, int]:
    """Saturate a path of ``depth`` arcs; returns the flow and the place of the first full arc."""
    amount = np.inf
    for step in range(depth):
        amount = min(amount, network.room[path[step]])
    first = depth
    for step in range(depth - 1, -1, -1):
        network.room[path[step]] -= amount
        network.room[path[step] ^ 1] += amount
        if network.room[path[step]] <= network.least:
            first = step
    return amount, first


@compiled
def _blocking_flow(
    network: Network, source: int, sink: int, level: Integers, following: Integers, path: Integers
) -> float:
    """Send flow along shortest paths until there is none; returns the flow sent."""
    for node in range(len(following)):
        following[node] = network.head_at[node]
    sent = 0.0
    depth = 0
    node = source
    while True:
        if node == sink:
            amount, depth = _send(network, path, depth)
            sent += amount
            node = network.target[path[depth] ^ 1]
        elif following[node] < network.head_at[node + 1]:
            arc = network.arcs[following[node]]
            target = network.target[arc]
            if network.room[arc] > network.least and level[target] == level[node] + 1:
                path[depth] = arc
                depth += 1
                node = target
            else:
                following[node] += 1
        elif depth > 0:
            level[node] = -1
            depth -= 1
            node = network.target[path[depth] ^ 1]
        else:
            return sent


@compiled
def _maximum_flow(network: Network, source: int, sink: int, notes: Integers) -> float:
    """The maximum flow from source to sink; leaves the residual capacities in ``network``.

    Args:
        notes: scratch space, four numbers per node.
    """
    nodes = len(network.head_at) - 1
    level, queue, following, path = notes[0], notes[1], notes[2], notes[3]
    flow = 0.0
    while True:
        _levels(network, source, level, queue)
        if level[sink] < 0:
            return flow
        flow += _blocking_flow(network, source, sink, level, following[:nodes], path)
