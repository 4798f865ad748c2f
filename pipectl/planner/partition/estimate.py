"""Estimates of the simulated step, never above it, to order candidates and to stop early.

The estimate of a pipeline is its time by :mod:`pipectl.planner.partition.recurrence`,
in which no message waits for messages of others: that is what is simulated unless links are shared
or messages last longer than computations, and never more. No node does more work than its cores
allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.cluster import Cluster
from pipectl.compiled import compiled
from pipectl.link import Link
from pipectl.planner.costs.devices import Placement
from pipectl.planner.graph.downsets import Partition
from pipectl.planner.partition.recurrence import Stages, Transfers, step_s
from pipectl.planner.partition.route_sums import Cuts, Timings


class Pipelines(NamedTuple):
    """Pipelines of equally many stages.

    Args:
        forward_s, backward_s, update_s: on the stage's device; shape [pipelines, stages].
        source, target: of all transfers of all partitions.
        hold_s: by kind of link; shape [kinds, transfers].
        late_s: by kind of link.
        first: where activations and gradients of partition p begin, at 2 p and 2 p + 1.
        cut: partition of every pipeline.
        node, switch: of every stage; shape [pipelines, stages].
    """

    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    source: Integers
    target: Integers
    hold_s: Floats
    late_s: Floats
    first: Integers
    cut: Integers
    node: Integers
    switch: Integers


@compiled
def step_times(
    pipelines: Pipelines,
    warm_ups: Integers,
    micro_batches: int,
    last_share: float,
    begin: int,
    end: int,
    steps_s: Floats,
) -> None:
    """Fill in the step times of some pipelines.

    Args:
        warm_ups: by order and stage.
        begin, end: which pipelines.
        steps_s: shape [pipelines, orders].
    """
    stages = pipelines.forward_s.shape[1]
    nothing = np.zeros(stages, np.float64)
    for row in range(begin, end):
        place = 2 * pipelines.cut[row]
        ahead = _transfers(pipelines, row, pipelines.first[place], pipelines.first[place + 1])
        behind = _transfers(pipelines, row, pipelines.first[place + 1], pipelines.first[place + 2])
        for order in range(len(warm_ups)):
            costs = Stages(
                pipelines.forward_s[row],
                pipelines.backward_s[row],
                nothing,
                pipelines.update_s[row],
                warm_ups[order],
            )
            ends = np.zeros(stages, np.float64)
            steps_s[row, order] = step_s(costs, ahead, behind, micro_batches, last_share, ends)


@compiled
def _transfers(pipelines: Pipelines, row: int, begin: int, end: int) -> Transfers:
    """The transfers of one pipeline and direction on the links that they take there."""
    source, target = pipelines.source[begin:end], pipelines.target[begin:end]
    hold_s, late_s = np.empty(end - begin, np.float64), np.empty(end - begin, np.float64)
    for way in range(end - begin):
        kind = 0
        if pipelines.node[row, source[way]] != pipelines.node[row, target[way]]:
            near = pipelines.switch[row, source[way]] == pipelines.switch[row, target[way]]
            kind = 1 if near else 2
        hold_s[way] = pipelines.hold_s[kind, begin + way]
        late_s[way] = pipelines.late_s[kind]
    return Transfers(source, target, hold_s, late_s)


ROUNDING = 1e-9
"""By which share bounds are lowered, so that rounding puts none above what is simulated."""
CHUNK = 10**7
"""Actions and messages of the recurrence between two returns to Python."""


class Layout(NamedTuple):
    """Stages and their ranks.

    Args:
        recompute: which stages compute their forward again for their backward; empty if none.
    """

    partition: Partition
    placement: Placement
    recompute: tuple[bool, ...] = ()


class Bounds:
    """Bounds of layouts on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._nodes = np.array(cluster.node_of_rank, dtype=np.int64)
        self._speeds = np.array([node.device.speed for node in cluster.nodes], dtype=np.float64)
        self._cores = np.array([node.cores for node in cluster.nodes], dtype=np.float64)
        self._crowded = any(node.ranks > node.cores for node in cluster.nodes)
        names: dict[object, int] = {}
        found = [names.setdefault(node.switch, len(names)) for node in cluster.nodes]
        far = cluster.between_switches
        self._switches = np.array(found if far else [0] * len(found), dtype=np.int64)
        between = cluster.between_nodes
        self._ways = [(cluster.within_node,), (between,), (between, far) if far else (between,)]

    def steps_s(
        self,
        layouts: Sequence[Layout],
        cut: Integers,
        cuts: Cuts,
        timings: Timings,
        scale: float,
        shares: Sequence[float],
        warm_ups: Sequence[Sequence[int]],
    ) -> Floats:
        """No execution of these layouts in these orders takes less; shape [layouts, orders].

        Args:
            cut: which of the partitions each layout has.
            cuts: the distinct partitions of the layouts.
            scale: micro-batch size over the profile's.
            shares: size of every micro-batch relative to a full one.
        """
        pipelines = self._pipelines(layouts, cut, cuts, timings, scale, shares[-1])
        depths = np.array(warm_ups, dtype=np.int64)
        found = np.zeros((len(layouts), len(depths)))
        transfers = len(pipelines.source) // len(cuts.stage_of)
        actions = len(shares) * len(depths) * (depths.shape[1] + transfers)
        size = max(1, CHUNK // max(1, actions))
        for begin in range(0, len(layouts), size):
            end = min(begin + size, len(layouts))
            step_times(pipelines, depths, len(shares), shares[-1], begin, end, found)
        again = _again(layouts)
        if self._crowded or again.any():
            work = sum(shares) * (pipelines.forward_s * (1 + again) + pipelines.backward_s)
            found = np.maximum(found, self._work_bounds_s(pipelines, work)[:, None])
        bounds: Floats = found * (1 - ROUNDING)
        return bounds

    def _pipelines(
        self,
        layouts: Sequence[Layout],
        cut: Integers,
        cuts: Cuts,
        timings: Timings,
        scale: float,
        last_share: float,
    ) -> Pipelines:
        forward, backward = cuts.times_s(timings, scale)[:, cut]
        nodes = self._nodes[np.array([one.placement for one in layouts])]
        speeds = self._speeds[nodes]
        sums = cuts.sums
        count = int(sums.first[-1])
        sizes = np.ceil(sums.size_bytes[:count] * scale)
        return Pipelines(
            forward / speeds,
            backward / speeds,
            cuts.update_s()[cut] / speeds,
            sums.source[:count],
            sums.target[:count],
            np.array([_way_hold_s(way, sizes, last_share) for way in self._ways]),
            np.array([sum(link.latency_s for link in way) for way in self._ways]),
            sums.first,
            cut,
            nodes,
            self._switches[nodes],
        )

    def _work_bounds_s(self, pipelines: Pipelines, work: Floats) -> Floats:
        """Work of each pipeline's busiest stage, or node over its cores, and the update."""
        total = np.zeros((len(work), len(self._cores)))
        np.add.at(total, (np.arange(len(work))[:, None], pipelines.node), work)
        busiest = np.maximum(work.max(axis=1), (total / self._cores).max(axis=1))
        found: Floats = busiest + pipelines.update_s.max(axis=1)
        return found


def _again(layouts: Sequence[Layout]) -> Integers:
    """1 for every stage that recomputes, which it may do while it waits; else 0."""
    if not any(one.recompute for one in layouts):
        return np.zeros((1, 1), dtype=np.int64)
    none = (False,) * len(layouts[0].partition)
    return np.array([one.recompute or none for one in layouts], dtype=np.int64)


def _way_hold_s(way: Sequence[Link], sizes: Floats, last_share: float) -> Floats:
    """Time of full messages in which the slowest link of a way takes no other.

    A smaller last message takes its share of it; less, if it is faster than that.
    """
    found = hold_s(way[0], sizes)
    for link in way[1:]:
        found = np.maximum(found, hold_s(link, sizes))
    if last_share < 1 and any(link.timings for link in way):
        last = np.maximum.reduce([hold_s(link, sizes * last_share) for link in way])
        found = np.minimum(found, last / last_share)
    return found


def numbered_partitions(layouts: Sequence[Layout]) -> tuple[tuple[Partition, ...], Integers]:
    """The distinct partitions of some layouts, and which of them each layout has."""
    places: dict[Partition, int] = {}
    cut = np.array([places.setdefault(one.partition, len(places)) for one in layouts])
    return tuple(places), cut


def hold_s(link: Link, sizes: Floats) -> Floats:
    """:meth:`pipectl.link.Link.hold_s` of many sizes."""
    if not link.timings:
        return sizes / link.bandwidth_bytes_per_s
    known, times = np.array(link.timings, dtype=float).T
    beyond = np.maximum(sizes - known[-1], 0.0) / link.bandwidth_bytes_per_s
    held: Floats = np.maximum(np.interp(sizes, known, times) + beyond - link.latency_s, 0.0)
    return held
