"""Bytes that many partitions hold and send, by the exact routes of values, as arrays.

These are the inputs of times in :mod:`pipectl.planner.costs.stage_costs`, without objects: a
partition takes a few microseconds per operator, a thousandth of the time of its footprint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers, Records, record
from pipectl.compiled import compiled
from pipectl.planner.graph.blocks import BlockGraph, membership
from pipectl.planner.graph.downsets import Partition
from pipectl.profile import Profile

Timings = tuple[Floats, Floats]
"""Cached and uncached forward and backward of every operator; shapes [2, operators]."""
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
STAGE_SUMS = record(
    "parameter_bytes trained_bytes gradient_bytes saved_bytes"
    " received sent gradients_received gradients_sent"
)
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

    def times_s(self, timings: Timings, scale: float) -> Floats:
        """Forward and backward of one micro-batch; shape [2, partitions, stages].

        Args:
            scale: micro-batch size over the profile's.
        """
        overhead, sums = self.profile.stage, self.sums.stages
        partitions, stages = sums.shape
        place = (self.stage_of + stages * np.arange(partitions)[:, None]).ravel()
        (cached, uncached), share = timings, np.ones(sums.shape)
        if overhead.cache_bytes:
            # pipectl.profile.StageOverhead.uncached of many stages
            working_set = 2 * sums["parameter_bytes"] + sums["saved_bytes"] * scale
            share = np.clip(2 * (working_set / overhead.cache_bytes - 1), 0.0, 1.0)
        part = share.ravel()[place].reshape(self.stage_of.shape)
        times_s = np.zeros((2, *sums.shape))
        for kind in range(2):
            each = cached[kind] + (uncached[kind] - cached[kind]) * part
            times_s[kind] = np.bincount(place, each.ravel(), sums.size).reshape(sums.shape)
        received_s = sums["received"] * overhead.received_s + sums["sent"] * overhead.sent_s
        returned_s = (
            sums["gradients_received"] * overhead.gradient_received_s
            + sums["gradients_sent"] * overhead.gradient_sent_s
        )
        times_s[0] += overhead.forward_s + received_s
        more_s = overhead.backward_s + returned_s
        times_s[1] = np.where(times_s[1] > 0, times_s[1] + more_s, 0.0)
        return times_s

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

    def span(held: Sequence[int]) -> tuple[int, int]:
        users.extend(held)
        return len(users) - len(held), len(users)

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


def _users(held: Iterable[Mapping[str, int]]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The operators that hold each name, and its bytes."""
    users: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for index, named in enumerate(held):
        for name in named:
            users.setdefault(name, []).append(index)
        sizes.update(named)
    return users, sizes


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
