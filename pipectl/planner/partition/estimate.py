"""Estimates of the simulated step of many layouts, to order candidates and to stop early.

The estimate of a layout is its time by :mod:`pipectl.planner.partition.recurrence`, from the exact
routes of its values. Messages of different pairs of stages do not wait for each other, and sums of
gradients only for each other: the estimate equals the simulation unless messages share links or
take longer than computations, and with one replica per stage it is a lower bound. Of the overheads
of ranks, only those after every forward and backward count. Work per node is limited by its cores.
Replicas are taken to split every micro-batch, or to take whole ones in turn
(:mod:`pipectl.planner.partition.in_turn`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from pipectl.arrays import Floats, Integers, Records, unique
from pipectl.cluster import Cluster
from pipectl.compiled import compiled
from pipectl.planner.costs.footprint import Sums, baseline_bytes
from pipectl.planner.costs.links import Links, RankGroups
from pipectl.planner.costs.model import ModelCosts
from pipectl.planner.costs.stage_costs import stage_times
from pipectl.planner.graph.blocks import BlockGraph, membership
from pipectl.planner.graph.downsets import Partition
from pipectl.planner.partition.in_turn import Turns, steps_in_turn
from pipectl.planner.partition.layout import Layout
from pipectl.planner.partition.pipelines import Pipelines
from pipectl.planner.partition.recurrence import STAGE, WAY, run, step_s, sum_gradients
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile

ROUNDING = 1e-9
"""Share by which estimates are lowered, so that rounding raises none above the simulation."""
ROUNDING_BYTES = 16.0
"""More than sums of bytes are rounded by."""
CHUNK = 10**7
"""Actions and messages of the recurrence between two returns to Python."""
MAX_SUMS = 16
"""Maximum number of lists of partitions with cached sums."""


class Estimator:
    """Estimates steps for one profile, cluster and request.

    Args:
        graph: partitions are of its blocks.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        request: PlanRequest,
        graph: BlockGraph,
        costs: ModelCosts,
    ) -> None:
        self.links = Links(cluster)
        self._profile = profile
        self._request = request
        self._times = costs.times
        self._groups = RankGroups(self.links, request.memory_limit_bytes)
        self._cores = np.array([node.cores for node in cluster.nodes], dtype=np.float64)
        self._crowded = cluster.is_crowded
        self._footprints = costs.footprints
        self._blocks, self._block_of = len(graph), np.array(graph.block_of, dtype=np.int64)
        self._known_sums: dict[tuple[Partition, ...], Sums] = {}

    def steps_s(
        self, layouts: Sequence[Layout], size: int, warm_ups: Sequence[Sequence[int]]
    ) -> Floats:
        """Seconds of a 1F1B step of layouts with equally many stages; shape [layouts, warm-ups].

        Args:
            size: samples of a micro-batch.
        """
        cut, sums = self._sums(layouts)
        group = self._groups.number([one.ranks for one in layouts])
        count = ceil(self._request.batch_size / size)
        last_share = (self._request.batch_size - (count - 1) * size) / size
        pipelines = self._pipelines(sums, cut, group, size, last_share)
        depths = np.array(warm_ups, dtype=np.int64)
        steps_s = np.zeros((len(layouts), len(depths)))
        transfers = len(pipelines.ways) // len(sums.stage_of)
        actions = count * len(depths) * (depths.shape[1] + transfers)
        chunk = max(1, CHUNK // max(1, actions))
        most = int(np.diff(pipelines.first).max(initial=0))
        room = np.zeros((2, most), dtype=WAY)
        back = np.zeros((depths.shape[1], min(int(depths.max()), count) + 2))
        for begin in range(0, len(layouts), chunk):
            end = min(begin + chunk, len(layouts))
            step_times(
                pipelines, depths, count, last_share, self._request.updates_together,
                begin, end, room, back, steps_s,
            )  # fmt: skip
        return self._with_work(layouts, pipelines.stages, count - 1 + last_share, steps_s)

    def steps_in_turn_s(
        self, layouts: Sequence[Layout], size: int, warm_ups: Sequence[Sequence[Sequence[int]]]
    ) -> Floats:
        """As :meth:`steps_s`, if replicas take whole micro-batches in turn.

        Args:
            warm_ups: of every layout; shape [layouts, warm-ups, stages].
        """
        cut, sums = self._sums(layouts)
        group = self._groups.number([one.ranks for one in layouts])
        count = ceil(self._request.batch_size / size)
        last_share = (self._request.batch_size - (count - 1) * size) / size
        singles = self._groups.number([[(rank,) for rank in range(self.links.cluster.ranks)]])[0]
        pairs = np.repeat(singles, len(singles)), np.tile(singles, len(singles))
        self._groups.classes(*pairs)
        pipelines = self._pipelines(sums, cut, group, size, last_share, in_turn=True)
        most = max(len(ranks) for one in layouts for ranks in one.ranks)
        ranks = np.full((*group.shape, most), -1, dtype=np.int64)
        for row, one in enumerate(layouts):
            for stage, own in enumerate(one.ranks):
                ranks[row, stage, : len(own)] = own
        slowness = self._groups.slowness[singles][ranks]
        after_s = (self._groups.after_s[group] * (not self._crowded))[:, :, None]
        stages, replicas = pipelines.stages, self._groups.sizes[group]
        forward_s, backward_s = (
            stages[field][:, :, None] * slowness for field in ("forward_s", "backward_s")
        )
        by_rank = pipelines._replace(class_of=pipelines.class_of[np.ix_(singles, singles)])
        turns = Turns(
            ranks, replicas.astype(np.int64), forward_s + after_s,
            np.where(backward_s > 0, backward_s + after_s, 0.0),
        )  # fmt: skip
        depths = np.array(warm_ups, dtype=np.int64)
        steps_s = np.zeros(depths.shape[:2])
        ways = np.zeros((2, int(np.diff(pipelines.first).max(initial=0))), dtype=WAY)
        free_at = np.zeros((*ways.shape, most * most))
        back = np.zeros((group.shape[1], min(int(depths.max()), count) + 2))
        together = self._request.updates_together
        ends = np.zeros(ranks.shape[1:])
        steps_in_turn(
            by_rank, turns, depths, count, last_share, together, ways, free_at, back, ends, steps_s
        )
        for field, time_s in (("forward_s", forward_s), ("backward_s", backward_s)):
            stages[field] = time_s.max(axis=2) / replicas
        return self._with_work(layouts, stages, count - 1 + last_share, steps_s)

    def _with_work(
        self, layouts: Sequence[Layout], stages: Records, full: float, steps_s: Floats
    ) -> Floats:
        """Estimates that are no shorter than the work of the busiest stage, or node per core, if
        ranks recompute or share cores."""
        again = self._recomputing(layouts)
        if self._crowded or again.any():
            work = full * (stages["forward_s"] * (1 + again) + stages["backward_s"])
            steps_s = np.maximum(steps_s, self._work_s(stages, work)[:, None])
        estimates: Floats = steps_s * (1 - ROUNDING)
        return estimates

    def excess(
        self,
        layouts: Sequence[Layout],
        size: int,
        warm_ups: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]],
        *,
        in_turn: bool = False,
    ) -> Floats:
        """Relative excess of the fullest rank over its limit, by what it certainly holds at its
        first two backwards, without temporary values; shape [layouts, warm-ups].

        Args:
            warm_ups: shape [warm-ups, stages], or of every layout if replicas take whole
                micro-batches in turn.
            in_turn: whether they do.
        """
        group = self._groups.number([one.ranks for one in layouts])
        limits = self._groups.limits_bytes[group]
        every = np.array(warm_ups, dtype=np.int64)
        if np.isinf(limits).all():
            return np.zeros((len(layouts), every.shape[-2]))
        cut, sums = self._sums(layouts)
        profile, replicas = self._profile, self._groups.sizes[group]
        per_replica = size / profile.micro_batch_size / (1 if in_turn else replicas)
        summed = sums.gradient_bytes[cut].astype(np.float64)
        state = profile.optimizer_cost.state_bytes_per_parameter_byte
        state_share = 1.0 / replicas if self._request.shard_optimizer else 1.0
        held = baseline_bytes(profile) + sums.parameter_bytes[cut] + sums.cast_bytes[cut]
        resident = held + state * state_share * sums.trained_bytes[cut]
        saved = sums.saved_bytes[cut] * per_replica
        arrived = sums.received_bytes[cut] * per_replica
        returned = sums.returned_bytes[cut] * per_replica
        # A stage that recomputes keeps its inputs; all else exists from RECOMPUTE to BACKWARD.
        kept = np.where(self._recomputing(layouts), arrived, saved)
        backward = saved - kept + returned
        summing = np.where(replicas > 1, summed * (3 - 1 / replicas), summed)
        whole: Floats | float = (
            self._request.batch_size / size
        )  # the last micro-batch may be smaller
        if in_turn:  # of each stage, its first replica has the most micro-batches
            every = np.ceil(np.moveaxis(every, 1, 0) / replicas)
            whole = np.maximum(1.0, whole / replicas)
        shares = []
        for depths in every:
            # The first backward frees what one micro-batch keeps; the next forward, if any, adds
            # as much again. From then on there are gradients.
            first = np.minimum(depths, whole) * kept + backward
            second = summed + np.minimum(depths, whole - 1) * kept + backward * (whole >= 2)
            most = np.maximum(np.maximum(first, second), summing)
            shares.append((resident + most - ROUNDING_BYTES) / limits - 1)
        excess: Floats = np.maximum(0.0, np.stack([each.max(axis=1) for each in shares], axis=1))
        return excess

    def _sums(self, layouts: Sequence[Layout]) -> tuple[Integers, Sums]:
        """The partition of each layout, and the sums of partitions, cached for other sizes."""
        places: dict[Partition, int] = {}
        cut = np.array([places.setdefault(one.partition, len(places)) for one in layouts])
        partitions, known = tuple(places), self._known_sums
        if partitions not in known:
            if len(known) == MAX_SUMS:
                del known[next(iter(known))]
            stages = len(partitions[0])
            flat = [stage for partition in partitions for stage in partition]
            rows = membership(flat, self._blocks).reshape(len(partitions), stages, self._blocks)
            known[partitions] = self._footprints.sums(
                rows.argmax(axis=1)[:, self._block_of], stages
            )
        return cut, known[partitions]

    def _pipelines(
        self,
        sums: Sums,
        cut: Integers,
        group: Integers,
        size: int,
        last_share: float,
        *,
        in_turn: bool = False,
    ) -> Pipelines:
        """Pipelines whose replicas split micro-batches; if they take whole ones in turn, stages
        have the times of these on the profile's device, without the overheads of ranks."""
        groups, profile, own = self._groups, self._profile, self._profile.micro_batch_size
        slowness, replicas = groups.slowness[group], groups.sizes[group]
        samples = np.full(group.shape, float(size)) if in_turn else np.ceil(size / replicas)
        forward_s, backward_s = np.zeros(group.shape), np.zeros(group.shape)
        for part in unique(samples).tolist():
            times = self._times.at(int(part))
            forward, backward = stage_times(sums, times, part / own, profile.stage)[:, cut]
            taken = samples == part
            forward_s[taken], backward_s[taken] = forward[taken], backward[taken]
        first, source, target, size_bytes = sums.transfers
        senders, receivers = np.divmod(unique(source * group.shape[1] + target), group.shape[1])
        class_of = groups.classes(group[:, senders].ravel(), group[:, receivers].ravel())
        sizes = np.ceil(size_bytes * (size / own))
        # On shared cores, this is work before the next computation instead.
        after_s = groups.after_s[group] * (not (self._crowded or in_turn))
        stages = np.zeros(group.shape, dtype=STAGE)
        stages["group"] = group
        slowest = np.ones(group.shape) if in_turn else groups.slowness_at(size)[group]
        stages["forward_s"] = forward_s * slowest + after_s
        stages["backward_s"] = np.where(backward_s > 0, backward_s * slowest + after_s, 0.0)
        stages["summed_bytes"] = sums.gradient_bytes[cut]
        stages["reduce_s"] = groups.reduce_s(group, stages["summed_bytes"])
        update_s = profile.optimizer_cost.step_s_per_byte * sums.trained_bytes
        shared = replicas if self._request.shard_optimizer else 1.0
        stages["update_s"] = update_s[cut] * slowness / shared
        ways = np.zeros(len(source), dtype=WAY)
        ways["source"], ways["target"] = source, target
        hold_s, late_s = self.links.hold_s(sizes, last_share), self.links.late_s()
        held, free_at = groups.held(), np.zeros(groups.parts)
        return Pipelines(stages, ways, hold_s, late_s, first, cut, class_of, held, free_at)

    def _work_s(self, stages: Records, work: Floats) -> Floats:
        """Seconds of work of each pipeline's busiest stage, or node per core, with the update."""
        on_nodes = self._groups.on_nodes[stages["group"]]
        total = (work[:, :, None] * on_nodes).sum(axis=1)
        busiest = np.maximum(work.max(axis=1), (total / self._cores).max(axis=1))
        if self._request.updates_together:
            work_s: Floats = busiest + stages["update_s"].max(axis=1)
        else:
            work_s = np.maximum(busiest, (work + stages["update_s"]).max(axis=1))
        return work_s

    def _recomputing(self, layouts: Sequence[Layout]) -> Integers:
        """1 if a stage recomputes, which it may do while it waits; else 0."""
        everywhere = bool(self._request.recompute)
        if everywhere or not any(one.recompute for one in layouts):
            return np.full((1, 1), everywhere, dtype=np.int64)
        none = (False,) * len(layouts[0].partition)
        return np.array([one.recompute or none for one in layouts], dtype=np.int64)


@compiled
def step_times(
    pipelines: Pipelines,
    warm_ups: Integers,
    micro_batches: int,
    last_share: float,
    together: bool,
    begin: int,
    end: int,
    room: Records,
    back: Floats,
    steps_s: Floats,
) -> None:
    """Fill in the step times of some pipelines.

    Args:
        warm_ups: by order and stage.
        together: whether all ranks update together.
        begin, end: range of pipelines.
        room: scratch space for the messages of one pipeline in both directions; shape
            [2, messages].
        back: scratch space; see :func:`pipectl.planner.partition.recurrence.run`.
        steps_s: shape [pipelines, orders].
    """
    for row in range(begin, end):
        stages, place = pipelines.stages[row], 2 * pipelines.cut[row]
        first, second = pipelines.first[place], pipelines.first[place + 1]
        ahead, behind = room[0, : second - first], room[1, : pipelines.first[place + 2] - second]
        _place(pipelines, stages, first, ahead)
        _place(pipelines, stages, second, behind)
        for order in range(len(warm_ups)):
            warm_up = warm_ups[order]
            run(stages, ahead, behind, warm_up, back, micro_batches, last_share)
            sum_gradients(stages, pipelines.held, pipelines.free_at)
            steps_s[row, order] = step_s(stages, together)


@compiled
def _place(pipelines: Pipelines, stages: Records, first: int, ways: Records) -> None:
    """Set the link times of the messages of one pipeline in one direction."""
    for index in range(len(ways)):
        way, given = ways[index], pipelines.ways[first + index]
        way.source, way.target = given.source, given.target
        groups = stages[given.source].group, stages[given.target].group
        number = pipelines.class_of[groups[0], groups[1]]
        way.hold_s = pipelines.hold_s[number, first + index]
        way.late_s = pipelines.late_s[number]
