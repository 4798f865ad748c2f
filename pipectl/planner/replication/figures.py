"""What stages with replicas load, on a cluster whose ranks are taken to be equal.

A micro-batch is split over the replicas of a stage, so its compute is that of the largest part, and
a replica sends and receives its part of what crosses the stage's borders. Every rank counts with
the slowest device and the smallest memory of the cluster, every message with the link between
nodes where there are several. So the figures are cautious, and judging is left to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.cluster import Cluster
from pipectl.planner.assumptions import baseline_bytes
from pipectl.planner.costs.held import held_bytes
from pipectl.planner.costs.operator_times import operator_times
from pipectl.planner.graph.blocks import BlockGraph, bits, condense, follows, membership
from pipectl.planner.graph.downsets import all_downsets, prefix_downsets
from pipectl.profile import Profile
from pipectl.simulate.reduction import reduction_s

MOST_STATES = 96
"""Of all downsets so many are kept: in every part of the work those with the least to send."""
MOST_DOWNSETS = 2000
REFERENCE_BYTES = 2**20
"""A message of this size says what a link takes per byte."""


class Figures(NamedTuple):
    """Sums over the downsets that stages may begin and end at, for every number of replicas.

    Args:
        follows: 1 where the second state holds all of the first and more; shape [states, states].
        replicas: the numbers a stage may have, ascending; shape [counts].
        work_s: forward and backward of a replica's part; shape [counts, states].
        moved_s: to send what crosses a cut at the state, or what comes back if that is longer;
            shape [counts, states].
        reduce_s_per_byte: of summing gradients, spread over the micro-batches; shape [counts].
        trained_bytes, saved_bytes: of the operators inside: parameters with a gradient, and what a
            micro-batch keeps; shape [states].
        resident_bytes: of a replica: all that stays; shape [counts, states].
        stage_s: what a stage takes besides.
        micro_batches: no stage holds more.
        limit_bytes: memory of a rank.
    """

    follows: Integers
    replicas: Integers
    work_s: Floats
    moved_s: Floats
    reduce_s_per_byte: Floats
    trained_bytes: Floats
    resident_bytes: Floats
    saved_bytes: Floats
    stage_s: float
    micro_batches: int
    limit_bytes: float


class States(NamedTuple):
    """Downsets by rising size, as bitsets of the blocks of a graph."""

    graph: BlockGraph
    downsets: list[int]


def states_of(profile: Profile) -> States:
    """At most about ``MOST_STATES`` downsets that cover the work evenly."""
    graph = condense(profile)
    found = all_downsets(graph, MOST_DOWNSETS) or prefix_downsets(graph, MOST_DOWNSETS)
    if len(found) <= MOST_STATES:
        return States(graph, found)
    times = operator_times(profile, profile.micro_batch_size).uncached
    per_block = [sum(sum(times[i]) for i in block.operators) for block in graph.blocks]
    work = np.array([sum(per_block[block] for block in bits(downset)) for downset in found])
    moved = _crossing(graph, found).max(axis=0)
    part = np.floor(work / max(work[-1], 1e-30) * (MOST_STATES / 2 - 1)).astype(np.int64)
    order = np.lexsort((np.arange(len(found)), moved, part))
    rank = np.arange(len(found)) - np.searchsorted(part[order], part[order])
    kept = sorted({0, len(found) - 1, *order[rank < 2].tolist()})
    return States(graph, [found[index] for index in kept])


def figures_of(
    profile: Profile,
    cluster: Cluster,
    states: States,
    size: int,
    micro_batches: int,
    limit_bytes: float,
    *,
    shard_optimizer: bool = False,
) -> Figures:
    """The figures for micro-batches of ``size`` samples.

    Args:
        shard_optimizer: whether replicas share out the optimizer's state.
    """
    graph, downsets = states
    devices = [node.device for node in cluster.nodes]
    speed = min(device.speed for device in devices)
    memory = min((d.memory_bytes for d in devices if d.memory_bytes is not None), default=inf)
    counts = _counts(min(cluster.ranks, size), size)
    inside = membership(downsets, len(graph))
    members = np.ascontiguousarray(inside[:, list(graph.block_of)], dtype=np.float64)
    held = held_bytes(profile, members, counts, shard_optimizer=shard_optimizer)
    scale = size / profile.micro_batch_size
    work = [members @ _work(profile, -(-size // count)) / speed for count in counts]
    return Figures(
        follows=follows(inside).astype(np.int64),
        replicas=np.array(counts, dtype=np.int64),
        work_s=np.array(work),
        moved_s=_moved(cluster, _crossing(graph, downsets).max(axis=0) * scale, counts),
        reduce_s_per_byte=_reduce(cluster, counts, micro_batches),
        trained_bytes=held.trained,
        resident_bytes=held.resident,
        saved_bytes=held.saved * scale,
        stage_s=(profile.stage.forward_s + profile.stage.backward_s) / speed,
        micro_batches=micro_batches,
        limit_bytes=float(min(memory, limit_bytes) - baseline_bytes(profile)),
    )


def _counts(most: int, size: int) -> list[int]:
    """The smallest number of replicas for every size that the largest part can have."""
    return [r for r in range(1, most + 1) if r == 1 or -(-size // r) < -(-size // (r - 1))]


def _work(profile: Profile, size: int) -> Floats:
    times = operator_times(profile, size).uncached
    return np.array([forward_s + backward_s for forward_s, backward_s in times])


def _crossing(graph: BlockGraph, downsets: Sequence[int]) -> Floats:
    """Bytes that a cut at each downset sends on and gets back; shape [2, downsets]."""
    found = np.zeros((2, len(downsets)))
    for place, downset in enumerate(downsets):
        for value in graph.values:
            if downset >> value.producer & 1 and value.blocks & ~downset:
                found[:, place] += value.size_bytes, value.gradient_bytes
    return found


def _moved(cluster: Cluster, size_bytes: Floats, counts: Sequence[int]) -> Floats:
    """Replicas on one node share its link to others."""
    several = len(cluster.nodes) > 1
    link = cluster.between_nodes if several else cluster.within_node
    beside = max(node.ranks for node in cluster.nodes) if several and link.shared else 1
    shares = [min(beside, count) / count for count in counts]
    return np.array([[link.hold_s(size * share) for size in size_bytes] for share in shares])


def _reduce(cluster: Cluster, counts: Sequence[int], micro_batches: int) -> Floats:
    """Over the first ranks, as the simulator prices sums; without what the smallest one takes."""
    seconds = [
        [
            reduction_s(cluster, cluster.node_of_rank, range(count), size)
            for size in (0.0, REFERENCE_BYTES)
        ]
        for count in counts
    ]
    return np.array([some_s - none_s for none_s, some_s in seconds]) / (
        REFERENCE_BYTES * micro_batches
    )
