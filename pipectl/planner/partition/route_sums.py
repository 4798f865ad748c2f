"""What many partitions need, by the exact routes of all values, as arrays.

These are the figures of :mod:`pipectl.planner.costs.stage_costs` that time depends on, without the
objects: a partition takes a few microseconds per operator, a thousandth of its footprint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled, part_of_kernel
from pipectl.planner.costs.liveness import memory_of, parameter_gradients
from pipectl.planner.graph.blocks import BlockGraph, membership
from pipectl.planner.graph.downsets import Partition
from pipectl.profile import Profile

Timings = tuple[Floats, Floats]
"""Cached and uncached forward and backward of every operator; shapes [2, operators]."""
ACTIVATION, GRADIENT = range(2)
RECEIVED, SENT, GRADIENTS_RECEIVED, GRADIENTS_SENT = range(4)
"""Columns of the numbers of values."""
REACHED, ARRIVED, KEPT = range(3)
"""Of every stage: the last value sent there, the last storage that came, and that it keeps."""


class Graph(NamedTuple):
    """What operators read, hold and send; storages and parameters are numbered.

    Args:
        reader, first_reader: readers of operator i are ``reader[first_reader[i]:...[i + 1]]``.
        output_bytes, gradient_bytes: of every operator's messages.
        kept_bytes: what the stage of an operator keeps of its value if that is sent.
        trained_bytes: of the parameters' gradients that each operator makes.
        maker, first_maker: by storage, as readers: the operators whose values lie in it.
        saver, first_saver, saved_bytes: those that save it for their backward, and its size.
        owner, first_owner, parameter_bytes: by parameter: those that use it, and its size.
    """

    reader: Integers
    first_reader: Integers
    output_bytes: Integers
    gradient_bytes: Integers
    kept_bytes: Integers
    trained_bytes: Integers
    maker: Integers
    first_maker: Integers
    saver: Integers
    first_saver: Integers
    saved_bytes: Integers
    owner: Integers
    first_owner: Integers
    parameter_bytes: Integers


class Sums(NamedTuple):
    """What partitions need, to be filled in.

    Args:
        parameter_bytes, gradient_bytes, saved_bytes: shape [partitions, stages]; the second of the
            parameters' gradients.
        values: numbers of values that enter and leave; shape [partitions, stages, 4].
        source, target, size_bytes: transfers; of every partition activations, then gradients, each
            by rising source and target.
        first: where those of partition p begin, at 2 p and 2 p + 1; shape [2 * partitions + 1].
    """

    parameter_bytes: Integers
    gradient_bytes: Integers
    saved_bytes: Integers
    values: Integers
    source: Integers
    target: Integers
    size_bytes: Integers
    first: Integers


@dataclass(frozen=True)
class Cuts:
    """Partitions into equally many stages.

    Args:
        stage_of: of every operator; shape [partitions, operators].
        sums: what does not depend on the micro-batch size, or is proportional to it.
    """

    stage_of: Integers
    sums: Sums
    profile: Profile

    def times_s(self, timings: Timings, scale: float) -> Floats:
        """Forward and backward of one micro-batch; shape [2, partitions, stages].

        Args:
            scale: micro-batch size over the profile's.
        """
        overhead, sums = self.profile.stage, self.sums
        shape = sums.saved_bytes.shape
        share: Floats = np.ones(shape)
        if overhead.cache_bytes:
            # pipectl.profile.StageOverhead.uncached of many stages
            working_set = 2 * sums.parameter_bytes + sums.saved_bytes * scale
            share = np.clip(2 * (working_set / overhead.cache_bytes - 1), 0.0, 1.0)
        times: Floats = np.zeros((2, *shape))
        sum_times(self.stage_of, share, *timings, times)
        received_s = (overhead.received_s, overhead.sent_s)
        returned_s = (overhead.gradient_received_s, overhead.gradient_sent_s)
        times[0] += overhead.forward_s + sums.values[:, :, :2] @ np.array(received_s)
        more = overhead.backward_s + sums.values[:, :, 2:] @ np.array(returned_s)
        times[1] = np.where(times[1] > 0, times[1] + more, 0.0)
        return times

    def update_s(self) -> Floats:
        """Optimizer step; shape [partitions, stages]."""
        step_s_per_byte = self.profile.optimizer_cost.step_s_per_byte
        return np.asarray(step_s_per_byte * self.sums.parameter_bytes, dtype=np.float64)


class PartitionSums:
    """Cuts one profile's operators into stages.

    Args:
        graph: of blocks; partitions are of these.
    """

    def __init__(self, profile: Profile, graph: BlockGraph) -> None:
        self._profile = profile
        self._graph = _arrays(profile)
        self._block_of = np.array(graph.block_of, dtype=np.int64)
        self._blocks = len(graph)

    def cut(self, partitions: Sequence[Partition]) -> Cuts:
        """What partitions into equally many stages need; at least one."""
        stages, edges = len(partitions[0]), len(self._graph.reader)
        flat = [stage for partition in partitions for stage in partition]
        rows = membership(flat, self._blocks).reshape(len(partitions), stages, self._blocks)
        stage_of = np.ascontiguousarray(rows.argmax(axis=1)[:, self._block_of])
        room = len(partitions) * 2 * min(edges, stages * (stages - 1) // 2)
        shape = len(partitions), stages
        sums = Sums(
            parameter_bytes=np.zeros(shape, dtype=np.int64),
            gradient_bytes=np.zeros(shape, dtype=np.int64),
            saved_bytes=np.zeros(shape, dtype=np.int64),
            values=np.zeros((*shape, 4), dtype=np.int64),
            source=np.zeros(room, dtype=np.int64),
            target=np.zeros(room, dtype=np.int64),
            size_bytes=np.zeros(room, dtype=np.int64),
            first=np.zeros(2 * len(partitions) + 1, dtype=np.int64),
        )
        seen = np.full((3, stages), -1, dtype=np.int64)
        moved = np.full((2, stages, stages), -1, dtype=np.int64)
        sum_cuts(self._graph, stage_of, sums, seen, moved)
        return Cuts(stage_of, sums, self._profile)


def _arrays(profile: Profile) -> Graph:
    operators = profile.operators
    memory = [memory_of(operator) for operator in operators]
    made = {o.id: m.made_bytes for o, m in zip(operators, memory, strict=True)}
    kept = [made.get(m.storage) or o.output_bytes for o, m in zip(operators, memory, strict=True)]
    storages: dict[str, list[int]] = {}
    for index, own in enumerate(memory):
        storages.setdefault(own.storage, []).append(index)
    savers, saved = _users([dict(operator.saved) for operator in operators])
    names = dict.fromkeys((*storages, *savers))
    owners, parameters = _users([dict(operator.parameters) for operator in operators])
    return Graph(
        *_joined(profile.readers),
        _integers(operator.output_bytes for operator in operators),
        _integers(operator.gradient_bytes for operator in operators),
        _integers(kept),
        _integers(sum(size for _, size in parameter_gradients(each)) for each in operators),
        *_joined(storages.get(name, ()) for name in names),
        *_joined(savers.get(name, ()) for name in names),
        _integers(saved.get(name, 0) for name in names),
        *_joined(owners.values()),
        _integers(parameters[name] for name in owners),
    )


def _users(held: Iterable[Mapping[str, int]]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The operators that hold each name, and its bytes."""
    users: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for index, named in enumerate(held):
        for name in named:
            users.setdefault(name, []).append(index)
        sizes.update(named)
    return users, sizes


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, dtype=np.int64)


def _joined(groups: Iterable[Sequence[int]]) -> tuple[Integers, Integers]:
    """All groups in one array, and where each begins."""
    found = list(groups)
    first = np.cumsum([0, *map(len, found)], dtype=np.int64)
    return _integers(chain.from_iterable(found)), first


@compiled
def sum_cuts(graph: Graph, stage_of: Integers, sums: Sums, seen: Integers, moved: Integers) -> None:
    """Fill in what every partition needs.

    Args:
        stage_of: of every operator; shape [partitions, operators].
        seen: room for the last mark of every stage, below 0; shape [3, stages].
        moved: room for the bytes between two stages, below 0; shape [2, stages, stages].
    """
    storages, parameters = len(graph.first_saver) - 1, len(graph.first_owner) - 1
    operators = len(graph.output_bytes)
    place = mark = 0
    for partition in range(len(stage_of)):
        home = stage_of[partition]
        for operator in range(operators):
            sums.gradient_bytes[partition, home[operator]] += graph.trained_bytes[operator]
        for parameter in range(parameters):
            mark += 1
            for user in range(graph.first_owner[parameter], graph.first_owner[parameter + 1]):
                stage = home[graph.owner[user]]
                if seen[KEPT, stage] != mark:
                    seen[KEPT, stage] = mark
                    sums.parameter_bytes[partition, stage] += graph.parameter_bytes[parameter]
        for storage in range(storages):
            mark += 1
            _sum_storage(graph, storage, home, partition, sums, seen, moved, mark)
        for kind in range(2):
            sums.first[2 * partition + kind] = place
            place = _list_transfers(moved[kind], sums, place)
    sums.first[2 * len(stage_of)] = place


@part_of_kernel
def _sum_storage(
    graph: Graph,
    storage: int,
    home: Integers,
    partition: int,
    sums: Sums,
    seen: Integers,
    moved: Integers,
    mark: int,
) -> None:
    """Send the values that lie in one storage, and let every stage keep it once."""
    makers = range(graph.first_maker[storage], graph.first_maker[storage + 1])
    for made in makers:
        _send(graph, graph.maker[made], home, partition, sums, seen, moved, mark)
    for user in range(graph.first_saver[storage], graph.first_saver[storage + 1]):
        stage = home[graph.saver[user]]
        if seen[ARRIVED, stage] != mark and seen[KEPT, stage] != mark:
            seen[KEPT, stage] = mark
            sums.saved_bytes[partition, stage] += graph.saved_bytes[storage]
    for made in makers:
        producer = graph.maker[made]
        stage = home[producer]
        leaves = False
        for edge in range(graph.first_reader[producer], graph.first_reader[producer + 1]):
            leaves |= home[graph.reader[edge]] != stage
        if leaves and seen[ARRIVED, stage] != mark and seen[KEPT, stage] != mark:
            seen[KEPT, stage] = mark
            sums.saved_bytes[partition, stage] += graph.kept_bytes[producer]


@part_of_kernel
def _send(
    graph: Graph,
    producer: int,
    home: Integers,
    partition: int,
    sums: Sums,
    seen: Integers,
    moved: Integers,
    mark: int,
) -> None:
    """The routes of one value, and of its gradient; see :func:`pipectl.graph.routes`."""
    begin, end = graph.first_reader[producer], graph.first_reader[producer + 1]
    source = home[producer]
    before, crosses, chained = source, False, True
    for edge in range(begin, end):
        use = home[graph.reader[edge]]
        crosses |= use != source
        chained &= before <= use
        before = use
    if not crosses:
        return
    back, size = graph.gradient_bytes[producer], graph.output_bytes[producer]
    own = partition * len(graph.output_bytes) + producer
    values = sums.values[partition]
    previous = source
    for edge in range(begin, end):
        use = home[graph.reader[edge]]
        if use == source or seen[REACHED, use] == own:
            continue
        seen[REACHED, use] = own
        seen[ARRIVED, use] = mark
        sums.saved_bytes[partition, use] += size
        moved[ACTIVATION, source, use] = max(moved[ACTIVATION, source, use], 0) + size
        if back > 0:
            target = previous if chained else source
            moved[GRADIENT, use, target] = max(moved[GRADIENT, use, target], 0) + back
            values[use, RECEIVED] += 1
            values[use, GRADIENTS_SENT] += 1
            values[target, GRADIENTS_RECEIVED] += 1
            previous = use
    if back > 0:
        values[source, SENT] += 1


@part_of_kernel
def _list_transfers(moved: Integers, sums: Sums, place: int) -> int:
    """The transfers by source and target; makes room for those of the next partition."""
    for source in range(len(moved)):
        for target in range(len(moved)):
            if moved[source, target] >= 0:
                sums.source[place] = source
                sums.target[place] = target
                sums.size_bytes[place] = moved[source, target]
                moved[source, target] = -1
                place += 1
    return place


@compiled
def sum_times(
    stage_of: Integers, share: Floats, cached: Floats, uncached: Floats, times: Floats
) -> None:
    """Add up forwards and backwards of the operators of every stage.

    Args:
        stage_of: of every operator; shape [partitions, operators].
        share: of the way from cached to uncached times; shape [partitions, stages].
        cached, uncached: of every operator; shape [2, operators].
        times: zeros; shape [2, partitions, stages].
    """
    for partition in range(len(stage_of)):
        for operator in range(stage_of.shape[1]):
            stage = stage_of[partition, operator]
            part = share[partition, stage]
            for kind in range(2):
                fast, slow = cached[kind, operator], uncached[kind, operator]
                times[kind, partition, stage] += fast + (slow - fast) * part
