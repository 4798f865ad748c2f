"""Estimates of the simulated step of many layouts, to order candidates and to stop early.

The estimate of a layout is its time by :mod:`pipectl.planner.partition.recurrence`, from the exact
routes of its values (:mod:`pipectl.planner.partition.route_sums`). No message waits for messages of
others there: that is what is simulated unless links are shared or messages last longer than
computations, and with one replica per stage never more. Of what ranks take besides computing, what
follows every forward and backward counts. No node does more work than its cores allow. Replicas are
taken to split every micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.cluster import Cluster
from pipectl.compiled import compiled
from pipectl.planner.assumptions import baseline_bytes
from pipectl.planner.costs.links import Links, RankGroups
from pipectl.planner.costs.operator_times import OperatorTimes
from pipectl.planner.graph.blocks import BlockGraph
from pipectl.planner.graph.downsets import Partition
from pipectl.planner.partition.layout import Layout
from pipectl.planner.partition.recurrence import Stages, Transfers, step_s
from pipectl.planner.partition.route_sums import Cuts, PartitionSums
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile

ROUNDING = 1e-9
"""By which share estimates are lowered, so that rounding puts none above what is simulated."""
CHUNK = 10**7
"""Actions and messages of the recurrence between two returns to Python."""
MAX_CUTS = 16
"""Lists of partitions whose sums are kept."""


class Pipelines(NamedTuple):
    """Pipelines of equally many stages, for the kernel.

    Args:
        forward_s, backward_s, reduce_s, update_s: shape [pipelines, stages].
        source, target: of all transfers of all partitions.
        hold_s: by class of border; shape [classes, transfers].
        late_s: by class of border.
        first: where activations and gradients of partition p begin, at 2 p and 2 p + 1.
        cut: partition of every pipeline.
        group: of ranks, of every stage; shape [pipelines, stages].
        class_of: borders between two groups; shape [groups, groups].
    """

    forward_s: Floats
    backward_s: Floats
    reduce_s: Floats
    update_s: Floats
    source: Integers
    target: Integers
    hold_s: Floats
    late_s: Floats
    first: Integers
    cut: Integers
    group: Integers
    class_of: Integers


class Estimator:
    """Estimates for one profile, cluster and request.

    Args:
        graph: partitions are of its blocks.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        request: PlanRequest,
        graph: BlockGraph,
        times: OperatorTimes,
    ) -> None:
        self.links = Links(cluster)
        self._profile = profile
        self._request = request
        self._times = times
        self._groups = RankGroups(self.links, request.memory_limit_bytes)
        self._cores = np.array([node.cores for node in cluster.nodes], dtype=np.float64)
        self._crowded = any(node.ranks > node.cores for node in cluster.nodes)
        self._sums = PartitionSums(profile, graph)
        self._known_cuts: dict[tuple[Partition, ...], Cuts] = {}

    def steps_s(
        self, layouts: Sequence[Layout], size: int, warm_ups: Sequence[Sequence[int]]
    ) -> Floats:
        """The step of layouts with equally many stages by 1F1B; shape [layouts, warm-ups].

        Args:
            size: samples of a micro-batch.
        """
        cut, cuts = self._cut(layouts)
        group = self._groups.number([one.ranks for one in layouts])
        count = ceil(self._request.batch_size / size)
        last_share = (self._request.batch_size - (count - 1) * size) / size
        pipelines = self._pipelines(cuts, cut, group, size, last_share)
        depths = np.array(warm_ups, dtype=np.int64)
        found = np.zeros((len(layouts), len(depths)))
        transfers = len(pipelines.source) // len(cuts.stage_of)
        actions = count * len(depths) * (depths.shape[1] + transfers)
        chunk = max(1, CHUNK // max(1, actions))
        for begin in range(0, len(layouts), chunk):
            end = min(begin + chunk, len(layouts))
            step_times(pipelines, depths, count, last_share, begin, end, found)
        again = _recomputing(layouts)
        if self._crowded or again.any():
            full = count - 1 + last_share
            work = full * (pipelines.forward_s * (1 + again) + pipelines.backward_s)
            found = np.maximum(found, self._work_s(pipelines, work)[:, None])
        estimates: Floats = found * (1 - ROUNDING)
        return estimates

    def excess(
        self, layouts: Sequence[Layout], size: int, warm_ups: Sequence[Sequence[int]]
    ) -> Floats:
        """By which share the fullest rank is above its limit, messages and temporary values left
        out; shape [layouts, warm-ups]."""
        cut, cuts = self._cut(layouts)
        group = self._groups.number([one.ranks for one in layouts])
        limits = self._groups.limits_bytes[group]
        if np.isinf(limits).all():
            return np.zeros((len(layouts), len(warm_ups)))
        profile, replicas = self._profile, self._groups.sizes[group]
        summed = cuts.sums.gradient_bytes[cut]
        state = profile.optimizer_cost.state_bytes_per_parameter_byte
        state_share = 1.0 / replicas if self._request.shard_optimizer else 1.0
        resident = baseline_bytes(profile) + cuts.sums.parameter_bytes[cut]
        resident = resident + summed * (1 + state * state_share)
        saved = cuts.sums.saved_bytes[cut] * (size / profile.micro_batch_size) / replicas
        summing = np.where(replicas > 1, summed * (2 - 1 / replicas), 0.0)
        found = [
            (resident + np.maximum(saved * np.array(depths), summing)) / limits - 1
            for depths in warm_ups
        ]
        excess: Floats = np.maximum(0.0, np.stack([each.max(axis=1) for each in found], axis=1))
        return excess

    def _cut(self, layouts: Sequence[Layout]) -> tuple[Integers, Cuts]:
        """Which partition each layout has, and their sums: several sizes have the same."""
        places: dict[Partition, int] = {}
        cut = np.array([places.setdefault(one.partition, len(places)) for one in layouts])
        partitions = tuple(places)
        if partitions not in self._known_cuts:
            if len(self._known_cuts) == MAX_CUTS:
                del self._known_cuts[next(iter(self._known_cuts))]
            self._known_cuts[partitions] = self._sums.cut(partitions)
        return cut, self._known_cuts[partitions]

    def _pipelines(
        self, cuts: Cuts, cut: Integers, group: Integers, size: int, last_share: float
    ) -> Pipelines:
        groups, own = self._groups, self._profile.micro_batch_size
        slowness, replicas = groups.slowness[group], groups.sizes[group]
        samples = np.ceil(size / replicas)
        forward_s, backward_s = np.zeros(group.shape), np.zeros(group.shape)
        for part in np.unique(samples).tolist():
            timings = self._times.arrays_at(int(part))
            forward, backward = cuts.times_s(timings, part / own)[:, cut]
            taken = samples == part
            forward_s[taken], backward_s[taken] = forward[taken], backward[taken]
        sums = cuts.sums
        transfers = int(sums.first[-1])
        source, target = sums.source[:transfers], sums.target[:transfers]
        pairs = np.unique(np.stack([source, target], axis=1), axis=0)
        class_of = groups.classes(group[:, pairs[:, 0]].ravel(), group[:, pairs[:, 1]].ravel())
        sizes = np.ceil(sums.size_bytes[:transfers] * (size / own))
        # On shared cores it is work that waits for the next computation instead.
        after_s = groups.after_s[group] * (not self._crowded)
        return Pipelines(
            forward_s * slowness + after_s,
            np.where(backward_s > 0, backward_s * slowness + after_s, 0.0),
            groups.reduce_s(group, sums.gradient_bytes[cut].astype(np.float64)),
            cuts.update_s()[cut] * slowness,
            source,
            target,
            self.links.hold_s(sizes, last_share),
            self.links.late_s(),
            sums.first,
            cut,
            group,
            class_of,
        )

    def _work_s(self, pipelines: Pipelines, work: Floats) -> Floats:
        """Work of each pipeline's busiest stage, or node over its cores, and the update."""
        on_nodes = self._groups.on_nodes[pipelines.group]
        total = (work[:, :, None] * on_nodes).sum(axis=1)
        busiest = np.maximum(work.max(axis=1), (total / self._cores).max(axis=1))
        found: Floats = busiest + pipelines.update_s.max(axis=1)
        return found


def _recomputing(layouts: Sequence[Layout]) -> Integers:
    """1 for every stage that recomputes, which it may do while it waits; else 0."""
    if not any(one.recompute for one in layouts):
        return np.zeros((1, 1), dtype=np.int64)
    none = (False,) * len(layouts[0].partition)
    return np.array([one.recompute or none for one in layouts], dtype=np.int64)


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
    for row in range(begin, end):
        place = 2 * pipelines.cut[row]
        ahead = _transfers(pipelines, row, pipelines.first[place], pipelines.first[place + 1])
        behind = _transfers(pipelines, row, pipelines.first[place + 1], pipelines.first[place + 2])
        for order in range(len(warm_ups)):
            costs = Stages(
                pipelines.forward_s[row],
                pipelines.backward_s[row],
                pipelines.reduce_s[row],
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
        groups = pipelines.group[row, source[way]], pipelines.group[row, target[way]]
        number = pipelines.class_of[groups[0], groups[1]]
        hold_s[way] = pipelines.hold_s[number, begin + way]
        late_s[way] = pipelines.late_s[number]
    return Transfers(source, target, hold_s, late_s)
