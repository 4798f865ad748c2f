"""Estimates of the simulated step of many layouts, to order candidates and to stop early.

The estimate of a layout is its time by :mod:`pipectl.planner.partition.recurrence`, from the exact
routes of its values. Messages of different pairs of stages do not wait for each other: the estimate
equals the simulation unless links are shared or messages take longer than computations, and with
one replica per stage it is a lower bound. Of the overheads of ranks, only those after every forward
and backward count. Work per node is limited by its cores. Replicas are taken to split every
micro-batch.

Memory and messages of partitions are summed by a kernel, which takes a few microseconds per
operator, a thousandth of the time of a footprint (:mod:`pipectl.planner.costs.footprint`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers, Records, record, unique
from pipectl.cluster import Cluster
from pipectl.compiled import compiled
from pipectl.planner.costs.footprint import baseline_bytes
from pipectl.planner.costs.links import Links, RankGroups
from pipectl.planner.costs.stage_costs import OperatorTimes, Times, sum_times
from pipectl.planner.graph.blocks import BlockGraph, membership
from pipectl.planner.graph.downsets import Partition
from pipectl.planner.partition.layout import Layout
from pipectl.planner.partition.programme import ROUNDING_BYTES
from pipectl.planner.partition.recurrence import STAGE, WAY, step_s
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile

ROUNDING = 1e-9
"""Share by which estimates are lowered, so that rounding raises none above the simulation."""
CHUNK = 10**7
"""Actions and messages of the recurrence between two returns to Python."""
MAX_CUTS = 16
"""Maximum number of lists of partitions with cached sums."""
ACTIVATION, GRADIENT = range(2)
REACHED, ARRIVED, KEPT = range(3)
"""Rows per stage: the last value sent to it, the last storage that arrived, and that it keeps."""

OPERATOR = record("reader end output_bytes gradient_bytes kept_bytes trained_bytes")
"""Per operator: range of its readers, bytes of its messages, bytes of its value that its stage
keeps if it is sent, and bytes of the gradients of its parameters."""
STORAGE = record("maker maker_end saver saver_end saved_bytes")
"""Per storage: ranges of the operators whose values are in it, and of those that save it for their
backward."""
PARAMETER = record("owner end size_bytes trained_bytes")
"""Per parameter: range of the operators that use it; ``trained_bytes`` is 0 if it is frozen."""
VALUES = ("received", "sent", "gradients_received", "gradients_sent")
"""Numbers of values, as in a footprint."""
STAGE_SUMS = record(f"parameter_bytes trained_bytes gradient_bytes saved_bytes {' '.join(VALUES)}")
"""Per stage: bytes, the third of the parameters' gradients, and numbers of values."""
TRANSFER = record("source target size_bytes")


class Graph(NamedTuple):
    """Readers, storages and parameters of operators, as arrays.

    Args:
        users: indices of operators: readers, makers, savers and owners.
    """

    operators: Records
    storages: Records
    parameters: Records
    users: Integers


class Sums(NamedTuple):
    """Memory and messages of partitions, filled in by :func:`sum_cuts`.

    Args:
        stages: shape [partitions, stages].
        transfers: per partition activations, then gradients, each by ascending source and target.
        first: start of those of partition p, at 2 p and 2 p + 1; shape [2 * partitions + 1].
    """

    stages: Records
    transfers: Records
    first: Integers


@dataclass(frozen=True)
class Cuts:
    """Partitions into equally many stages.

    Args:
        stage_of: of every operator; shape [partitions, operators].
        sums: values independent of the micro-batch size, or proportional to it.
    """

    stage_of: Integers
    sums: Sums
    profile: Profile

    def times_s(self, times: Times, scale: float) -> Floats:
        """Forward and backward of one micro-batch; shape [2, partitions, stages].

        Args:
            scale: micro-batch size over the profile's.
        """
        sums = self.sums.stages
        partitions, stages = sums.shape
        place = self.stage_of + stages * np.arange(partitions)[:, None]
        working_set = 2 * sums["parameter_bytes"] + sums["saved_bytes"] * scale
        values = np.stack([sums[name] for name in VALUES])
        return sum_times(times, place, working_set, values, self.profile.stage)

    @cached_property
    def arriving_bytes(self) -> tuple[Floats, Floats]:
        """Activations and gradients of one micro-batch that every stage receives; each of shape
        [partitions, stages]."""
        partitions, stages = self.sums.stages.shape
        count = np.diff(self.sums.first)
        of = np.repeat(np.arange(2 * partitions), count)  # partition and kind of each transfer
        transfers = self.sums.transfers[: len(of)]
        place = of * stages + transfers["target"]
        sizes = np.bincount(place, transfers["size_bytes"], 2 * partitions * stages)
        received = sizes.reshape(partitions, 2, stages).astype(np.float64)
        return received[:, 0], received[:, 1]

    def update_s(self) -> Floats:
        """Optimizer step; shape [partitions, stages]."""
        step_s_per_byte = self.profile.optimizer_cost.step_s_per_byte
        return np.asarray(step_s_per_byte * self.sums.stages["parameter_bytes"], dtype=np.float64)


class PartitionSums:
    """Cuts one profile's operators into stages.

    Args:
        graph: of blocks; partitions are of these.
    """

    def __init__(self, profile: Profile, graph: BlockGraph) -> None:
        self._profile = profile
        self._graph = _tables(profile)
        self._edges = len(profile.edge_indices)
        self._block_of = np.array(graph.block_of, dtype=np.int64)
        self._blocks = len(graph)

    def cut(self, partitions: Sequence[Partition]) -> Cuts:
        """The sums of partitions into equally many stages; at least one."""
        stages, edges = len(partitions[0]), self._edges
        flat = [stage for partition in partitions for stage in partition]
        rows = membership(flat, self._blocks).reshape(len(partitions), stages, self._blocks)
        stage_of = np.ascontiguousarray(rows.argmax(axis=1)[:, self._block_of])
        room = len(partitions) * 2 * min(edges, stages * (stages - 1) // 2)
        sums = Sums(
            stages=np.zeros((len(partitions), stages), dtype=STAGE_SUMS),
            transfers=np.zeros(room, dtype=TRANSFER),
            first=np.zeros(2 * len(partitions) + 1, dtype=np.int64),
        )
        seen = np.full((3, stages), -1, dtype=np.int64)
        moved = np.full((2, stages, stages), -1, dtype=np.int64)
        sum_cuts(self._graph, stage_of, sums, seen, moved)
        return Cuts(stage_of, sums, self._profile)


def _tables(profile: Profile) -> Graph:
    operators = profile.operators
    memory = [operator.allocations for operator in operators]
    made = {o.id: m.made_bytes for o, m in zip(operators, memory, strict=True)}
    kept = [made.get(m.storage) or o.output_bytes for o, m in zip(operators, memory, strict=True)]
    makers: dict[str, list[int]] = {}
    for index, own in enumerate(memory):
        makers.setdefault(own.storage, []).append(index)
    savers, saved = _users([dict(operator.saved) for operator in operators])
    owners, parameters = _users([dict(operator.parameters) for operator in operators])
    users: list[int] = []

    def span(more: Sequence[int]) -> tuple[int, int]:
        users.extend(more)
        return len(users) - len(more), len(users)

    trained_names = {name for each in operators for name, _ in each.parameter_gradients}
    trained = [sum(size for _, size in each.parameter_gradients) for each in operators]
    return Graph(
        operators=np.array(
            [
                (*span(readers), each.output_bytes, each.gradient_bytes, own, made_bytes)
                for readers, each, own, made_bytes in zip(
                    profile.readers, operators, kept, trained, strict=True
                )
            ],
            dtype=OPERATOR,
        ),
        storages=np.array(
            [
                (*span(makers.get(n, ())), *span(savers.get(n, ())), saved.get(n, 0))
                for n in dict.fromkeys((*makers, *savers))
            ],
            dtype=STORAGE,
        ),
        parameters=np.array(
            [
                (*span(owners[name]), size, size * (name in trained_names))
                for name, size in parameters.items()
            ],
            dtype=PARAMETER,
        ),
        users=np.array(users, dtype=np.int64),
    )


def _users(names_of: Iterable[Mapping[str, int]]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The operators that hold each name, and its bytes."""
    users: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for index, named in enumerate(names_of):
        for name in named:
            users.setdefault(name, []).append(index)
        sizes.update(named)
    return users, sizes


class Pipelines(NamedTuple):
    """Pipelines of equally many stages, as arrays for the kernel.

    Args:
        stages: shape [pipelines, stages].
        ways: messages of all partitions; their times depend on the class of the border.
        hold_s: by class of border; shape [classes, ways].
        late_s: by class of border.
        first: start of activations and gradients of partition p, at 2 p and 2 p + 1.
        cut: partition of every pipeline.
        class_of: class of the border between two groups; shape [groups, groups].
    """

    stages: Records
    ways: Records
    hold_s: Floats
    late_s: Floats
    first: Integers
    cut: Integers
    class_of: Integers


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
        """Seconds of a 1F1B step of layouts with equally many stages; shape [layouts, warm-ups].

        Args:
            size: samples of a micro-batch.
        """
        cut, cuts = self._cut(layouts)
        group = self._groups.number([one.ranks for one in layouts])
        count = ceil(self._request.batch_size / size)
        last_share = (self._request.batch_size - (count - 1) * size) / size
        pipelines = self._pipelines(cuts, cut, group, size, last_share)
        depths = np.array(warm_ups, dtype=np.int64)
        steps_s = np.zeros((len(layouts), len(depths)))
        transfers = len(pipelines.ways) // len(cuts.stage_of)
        actions = count * len(depths) * (depths.shape[1] + transfers)
        chunk = max(1, CHUNK // max(1, actions))
        most = int(np.diff(pipelines.first).max(initial=0))
        room = np.zeros((2, most), dtype=WAY)
        back = np.zeros((depths.shape[1], min(int(depths.max()), count) + 2))
        for begin in range(0, len(layouts), chunk):
            end = min(begin + chunk, len(layouts))
            step_times(pipelines, depths, count, last_share, begin, end, room, back, steps_s)
        again = self._recomputing(layouts)
        if self._crowded or again.any():
            full, stages = count - 1 + last_share, pipelines.stages
            work = full * (stages["forward_s"] * (1 + again) + stages["backward_s"])
            steps_s = np.maximum(steps_s, self._work_s(stages, work)[:, None])
        estimates: Floats = steps_s * (1 - ROUNDING)
        return estimates

    def excess(
        self, layouts: Sequence[Layout], size: int, warm_ups: Sequence[Sequence[int]]
    ) -> Floats:
        """Relative excess of the fullest rank over its limit, by what it certainly holds at its
        first two backwards, without temporary values; shape [layouts, warm-ups]."""
        cut, cuts = self._cut(layouts)
        group = self._groups.number([one.ranks for one in layouts])
        limits = self._groups.limits_bytes[group]
        if np.isinf(limits).all():
            return np.zeros((len(layouts), len(warm_ups)))
        profile, replicas = self._profile, self._groups.sizes[group]
        sums, per_replica = cuts.sums.stages[cut], size / profile.micro_batch_size / replicas
        summed = sums["gradient_bytes"]
        state = profile.optimizer_cost.state_bytes_per_parameter_byte
        state_share = 1.0 / replicas if self._request.shard_optimizer else 1.0
        resident = baseline_bytes(profile) + sums["parameter_bytes"]
        resident = resident + state * state_share * sums["trained_bytes"]
        saved = sums["saved_bytes"] * per_replica
        arrived, returned = (each[cut] * per_replica for each in cuts.arriving_bytes)
        # A stage that recomputes keeps its inputs; all else exists from RECOMPUTE to BACKWARD.
        kept = np.where(self._recomputing(layouts), arrived, saved)
        backward = saved - kept + returned
        summing = np.where(replicas > 1, summed * (3 - 1 / replicas), summed)
        whole = self._request.batch_size / size  # the last micro-batch may be smaller
        shares = []
        for depths in warm_ups:
            # The first backward frees what one micro-batch keeps; the next forward, if any, adds
            # as much again. From then on there are gradients.
            first = np.minimum(depths, whole) * kept + backward
            second = summed + np.minimum(depths, whole - 1) * kept + backward * (whole >= 2)
            most = np.maximum(np.maximum(first, second), summing)
            shares.append((resident + most - ROUNDING_BYTES) / limits - 1)
        excess: Floats = np.maximum(0.0, np.stack([each.max(axis=1) for each in shares], axis=1))
        return excess

    def _cut(self, layouts: Sequence[Layout]) -> tuple[Integers, Cuts]:
        """The partition of each layout, and the sums of partitions, cached for other sizes."""
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
        for part in unique(samples).tolist():
            forward, backward = cuts.times_s(self._times.at(int(part)), part / own)[:, cut]
            taken = samples == part
            forward_s[taken], backward_s[taken] = forward[taken], backward[taken]
        sums = cuts.sums
        transfers = sums.transfers[: int(sums.first[-1])]
        source, target = transfers["source"], transfers["target"]
        pairs = unique(np.stack([source, target], axis=1), axis=0)
        class_of = groups.classes(group[:, pairs[:, 0]].ravel(), group[:, pairs[:, 1]].ravel())
        sizes = np.ceil(transfers["size_bytes"] * (size / own))
        # On shared cores, this is work before the next computation instead.
        after_s = groups.after_s[group] * (not self._crowded)
        stages = np.zeros(group.shape, dtype=STAGE)
        stages["group"] = group
        stages["forward_s"] = forward_s * slowness + after_s
        stages["backward_s"] = np.where(backward_s > 0, backward_s * slowness + after_s, 0.0)
        gradient_bytes = sums.stages["gradient_bytes"][cut].astype(np.float64)
        stages["reduce_s"] = groups.reduce_s(group, gradient_bytes)
        stages["update_s"] = cuts.update_s()[cut] * slowness
        ways = np.zeros(len(transfers), dtype=WAY)
        ways["source"], ways["target"] = source, target
        hold_s, late_s = self.links.hold_s(sizes, last_share), self.links.late_s()
        return Pipelines(stages, ways, hold_s, late_s, sums.first, cut, class_of)

    def _work_s(self, stages: Records, work: Floats) -> Floats:
        """Seconds of work of each pipeline's busiest stage, or node per core, with the update."""
        on_nodes = self._groups.on_nodes[stages["group"]]
        total = (work[:, :, None] * on_nodes).sum(axis=1)
        busiest = np.maximum(work.max(axis=1), (total / self._cores).max(axis=1))
        work_s: Floats = busiest + stages["update_s"].max(axis=1)
        return work_s

    def _recomputing(self, layouts: Sequence[Layout]) -> Integers:
        """1 if a stage recomputes, which it may do while it waits; else 0."""
        everywhere = bool(self._request.recompute)
        if everywhere or not any(one.recompute for one in layouts):
            return np.full((1, 1), everywhere, dtype=np.int64)
        none = (False,) * len(layouts[0].partition)
        return np.array([one.recompute or none for one in layouts], dtype=np.int64)


@compiled
def sum_cuts(graph: Graph, stage_of: Integers, sums: Sums, seen: Integers, moved: Integers) -> None:
    """Fill in the sums of every partition.

    Args:
        stage_of: of every operator; shape [partitions, operators].
        seen: scratch space for the last mark of every stage, initially below 0; shape [3, stages].
        moved: scratch space for the bytes between two stages, initially below 0;
            shape [2, stages, stages].
    """
    place = mark = 0
    for partition in range(len(stage_of)):
        home, stages = stage_of[partition], sums.stages[partition]
        for operator in range(len(home)):
            stages[home[operator]].gradient_bytes += graph.operators[operator].trained_bytes
        for number in range(len(graph.parameters)):
            mark += 1
            parameter = graph.parameters[number]
            for user in range(parameter.owner, parameter.end):
                stage = home[graph.users[user]]
                if seen[KEPT, stage] != mark:
                    seen[KEPT, stage] = mark
                    stages[stage].parameter_bytes += parameter.size_bytes
                    stages[stage].trained_bytes += parameter.trained_bytes
        for number in range(len(graph.storages)):
            mark += 1
            first = partition * len(home)
            _sum_storage(graph, graph.storages[number], home, stages, seen, moved, mark, first)
        for kind in range(2):
            sums.first[2 * partition + kind] = place
            place = _list_transfers(moved[kind], sums.transfers, place)
    sums.first[2 * len(stage_of)] = place


@compiled
def _sum_storage(
    graph: Graph,
    storage: Any,
    home: Integers,
    stages: Records,
    seen: Integers,
    moved: Integers,
    mark: int,
    first: int,
) -> None:
    """Send the values in one storage, which every stage keeps once."""
    for made in range(storage.maker, storage.maker_end):
        producer = graph.users[made]
        own = first + producer
        _send(
            graph.operators[producer],
            graph.users,
            home[producer],
            home,
            stages,
            seen,
            moved,
            mark,
            own,
        )
    for user in range(storage.saver, storage.saver_end):
        stage = home[graph.users[user]]
        if seen[ARRIVED, stage] != mark and seen[KEPT, stage] != mark:
            seen[KEPT, stage] = mark
            stages[stage].saved_bytes += storage.saved_bytes
    for made in range(storage.maker, storage.maker_end):
        operator, stage = graph.operators[graph.users[made]], home[graph.users[made]]
        leaves = False
        for edge in range(operator.reader, operator.end):
            leaves |= home[graph.users[edge]] != stage
        if leaves and seen[ARRIVED, stage] != mark and seen[KEPT, stage] != mark:
            seen[KEPT, stage] = mark
            stages[stage].saved_bytes += operator.kept_bytes


@compiled
def _send(
    operator: Any,
    users: Integers,
    source: int,
    home: Integers,
    stages: Records,
    seen: Integers,
    moved: Integers,
    mark: int,
    own: int,
) -> None:
    """The routes of one value, and of its gradient; see :func:`pipectl.graph.routes`.

    Args:
        own: the mark of the value.
    """
    before, crosses, chained = source, False, True
    for edge in range(operator.reader, operator.end):
        use = home[users[edge]]
        crosses |= use != source
        chained &= before <= use
        before = use
    if not crosses:
        return
    back, size, previous = operator.gradient_bytes, operator.output_bytes, source
    for edge in range(operator.reader, operator.end):
        use = home[users[edge]]
        if use == source or seen[REACHED, use] == own:
            continue
        seen[REACHED, use] = own
        seen[ARRIVED, use] = mark
        stages[use].saved_bytes += size
        moved[ACTIVATION, source, use] = max(moved[ACTIVATION, source, use], 0) + size
        if back > 0:
            target = previous if chained else source
            moved[GRADIENT, use, target] = max(moved[GRADIENT, use, target], 0) + back
            stages[use].received += 1
            stages[use].gradients_sent += 1
            stages[target].gradients_received += 1
            previous = use
    if back > 0:
        stages[source].sent += 1


@compiled
def _list_transfers(moved: Integers, transfers: Records, place: int) -> int:
    """List the transfers by source and target, and clear ``moved`` for the next partition."""
    for source in range(len(moved)):
        for target in range(len(moved)):
            if moved[source, target] >= 0:
                transfer = transfers[place]
                transfer.source, transfer.target = source, target
                transfer.size_bytes = moved[source, target]
                moved[source, target] = -1
                place += 1
    return place


@compiled
def step_times(
    pipelines: Pipelines,
    warm_ups: Integers,
    micro_batches: int,
    last_share: float,
    begin: int,
    end: int,
    room: Records,
    back: Floats,
    steps_s: Floats,
) -> None:
    """Fill in the step times of some pipelines.

    Args:
        warm_ups: by order and stage.
        begin, end: range of pipelines.
        room: scratch space for the messages of one pipeline in both directions; shape
            [2, messages].
        back: scratch space; see :func:`pipectl.planner.partition.recurrence.step_s`.
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
            steps_s[row, order] = step_s(
                stages, ahead, behind, warm_up, back, micro_batches, last_share
            )


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
