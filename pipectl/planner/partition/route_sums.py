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


class Graph(NamedTuple):
    """What operators read, hold and send; names are numbers.

    Args:
        reader, first_reader: readers of operator i are ``reader[first_reader[i]:...[i + 1]]``.
        output_bytes, gradient_bytes: of every operator's messages.
        storage: name of the memory that each value lies in.
        kept_bytes: what the stage of an operator keeps of its value if that is sent.
        trained_bytes: of the parameters' gradients that each operator makes.
        parameter, parameter_bytes, first_parameter: by operator, as readers.
        saved, saved_bytes, first_saved: the same.
        names: how many there are.
    """

    reader: Integers
    first_reader: Integers
    output_bytes: Integers
    gradient_bytes: Integers
    storage: Integers
    kept_bytes: Integers
    trained_bytes: Integers
    parameter: Integers
    parameter_bytes: Integers
    first_parameter: Integers
    saved: Integers
    saved_bytes: Integers
    first_saved: Integers
    names: int


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


class Scratch(NamedTuple):
    """Room for one partition.

    Args:
        stage_of: of every operator.
        head, following, target, size_bytes: lists of transfers by kind and source.
        producer, home, consumer: of every activation route.
        used: transfers and routes so far.
        stamp, arrived: where a name or stage was last seen.
        size_seen: of every name.
        member, sender, receiver: operators and routes by stage.
        first_member, first_sender, first_receiver: where those of each stage begin.
    """

    stage_of: Integers
    head: Integers
    following: Integers
    target: Integers
    size_bytes: Integers
    producer: Integers
    home: Integers
    consumer: Integers
    used: Integers
    stamp: Integers
    arrived: Integers
    size_seen: Integers
    member: Integers
    sender: Integers
    receiver: Integers
    first_member: Integers
    first_sender: Integers
    first_receiver: Integers


ACTIVATION, GRADIENT = 0, 1
RECEIVED, SENT, GRADIENTS_RECEIVED, GRADIENTS_SENT = range(4)
"""Columns of the numbers of values."""


@compiled
def sum_cuts(graph: Graph, stage_of: Integers, sums: Sums) -> None:
    """Fill in what every partition needs.

    Args:
        stage_of: of every operator; shape [partitions, operators].
    """
    operators, stages = stage_of.shape[1], sums.parameter_bytes.shape[1]
    scratch = _scratch(graph, operators, stages)
    sums.first[0] = 0
    for partition in range(len(stage_of)):
        for operator in range(operators):
            scratch.stage_of[operator] = stage_of[partition, operator]
        _sum_cut(graph, partition, sums, scratch)


@compiled
def _scratch(graph: Graph, operators: int, stages: int) -> Scratch:
    """Room for a partition into so many stages."""
    edges, longest = len(graph.reader), max(stages, graph.names)
    return Scratch(
        np.empty(operators, np.int64),
        np.empty(2 * stages, np.int64),
        np.empty(2 * edges, np.int64),
        np.empty(2 * edges, np.int64),
        np.empty(2 * edges, np.int64),
        np.empty(edges, np.int64),
        np.empty(edges, np.int64),
        np.empty(edges, np.int64),
        np.empty(2, np.int64),
        np.empty(longest, np.int64),
        np.empty(longest, np.int64),
        np.empty(longest, np.int64),
        np.empty(operators, np.int64),
        np.empty(edges, np.int64),
        np.empty(edges, np.int64),
        np.empty(stages + 1, np.int64),
        np.empty(stages + 1, np.int64),
        np.empty(stages + 1, np.int64),
    )


@part_of_kernel
def _sum_cut(graph: Graph, partition: int, sums: Sums, scratch: Scratch) -> None:
    """Fill in what one partition needs."""
    stages = len(scratch.first_member) - 1
    scratch.used[0] = scratch.used[1] = 0
    for place in range(len(scratch.head)):
        scratch.head[place] = -1
    _forget(scratch.stamp)
    for producer in range(len(scratch.stage_of)):
        _send(graph, producer, partition, sums.values, scratch)
        home = scratch.stage_of[producer]
        sums.gradient_bytes[partition, home] += graph.trained_bytes[producer]
    _flatten(partition, sums, scratch)
    routes = scratch.used[1]
    _by_stage(scratch.stage_of, len(scratch.stage_of), scratch.member, scratch.first_member)
    _by_stage(scratch.home, routes, scratch.sender, scratch.first_sender)
    _by_stage(scratch.consumer, routes, scratch.receiver, scratch.first_receiver)
    _forget(scratch.stamp)
    for stage in range(stages):
        sums.parameter_bytes[partition, stage] = _parameter_bytes(graph, stage, scratch)
    _forget(scratch.stamp)
    _forget(scratch.arrived)
    for stage in range(stages):
        sums.saved_bytes[partition, stage] = _saved_bytes(graph, stage, scratch)


@part_of_kernel
def _forget(stamp: Integers) -> None:
    for name in range(len(stamp)):
        stamp[name] = -1


@part_of_kernel
def _send(
    graph: Graph,
    producer: int,
    partition: int,
    values: Integers,
    scratch: Scratch,
) -> None:
    """The routes of one value, and of its gradient; see :func:`pipectl.graph.routes`."""
    begin, end = graph.first_reader[producer], graph.first_reader[producer + 1]
    home = scratch.stage_of[producer]
    before, crosses, chained = home, False, True
    for edge in range(begin, end):
        use = scratch.stage_of[graph.reader[edge]]
        crosses |= use != home
        chained &= before <= use
        before = use
    if not crosses:
        return
    back = graph.gradient_bytes[producer]
    previous = home
    for edge in range(begin, end):
        use = scratch.stage_of[graph.reader[edge]]
        if use == home or scratch.stamp[use] == producer:
            continue
        scratch.stamp[use] = producer
        route = scratch.used[1]
        scratch.producer[route] = producer
        scratch.home[route] = home
        scratch.consumer[route] = use
        scratch.used[1] += 1
        _add_message(ACTIVATION, home, use, graph.output_bytes[producer], scratch)
        if back > 0:
            target = previous if chained else home
            _add_message(GRADIENT, use, target, back, scratch)
            values[partition, use, RECEIVED] += 1
            values[partition, use, GRADIENTS_SENT] += 1
            values[partition, target, GRADIENTS_RECEIVED] += 1
            previous = use
    if back > 0:
        values[partition, home, SENT] += 1


@part_of_kernel
def _add_message(kind: int, source: int, target: int, size_bytes: int, scratch: Scratch) -> None:
    """Add to the transfer between two stages; the list of a source rises by target."""
    head = kind * (len(scratch.head) // 2) + source
    before, at = -1, scratch.head[head]
    while at >= 0 and scratch.target[at] < target:
        before, at = at, scratch.following[at]
    if at >= 0 and scratch.target[at] == target:
        scratch.size_bytes[at] += size_bytes
        return
    new = scratch.used[0]
    scratch.used[0] += 1
    scratch.target[new] = target
    scratch.size_bytes[new] = size_bytes
    scratch.following[new] = at
    if before < 0:
        scratch.head[head] = new
    else:
        scratch.following[before] = new


@part_of_kernel
def _flatten(partition: int, sums: Sums, scratch: Scratch) -> None:
    """The lists of transfers one after the other."""
    place = sums.first[2 * partition]
    stages = len(scratch.head) // 2
    for head in range(len(scratch.head)):
        if head == stages:
            sums.first[2 * partition + 1] = place
        at = scratch.head[head]
        while at >= 0:
            sums.source[place] = head % stages
            sums.target[place] = scratch.target[at]
            sums.size_bytes[place] = scratch.size_bytes[at]
            place += 1
            at = scratch.following[at]
    sums.first[2 * partition + 2] = place


@part_of_kernel
def _by_stage(stage_of: Integers, count: int, found: Integers, first: Integers) -> None:
    """Indices by stage, rising within each, and where each stage begins."""
    stages = len(first) - 1
    for stage in range(stages + 1):
        first[stage] = 0
    for index in range(count):
        first[stage_of[index] + 1] += 1
    for stage in range(stages):
        first[stage + 1] += first[stage]
    for index in range(count):
        stage = stage_of[index]
        found[first[stage]] = index
        first[stage] += 1
    for stage in range(stages, 0, -1):
        first[stage] = first[stage - 1]
    first[0] = 0


@part_of_kernel
def _parameter_bytes(graph: Graph, stage: int, scratch: Scratch) -> int:
    """Of one stage; a parameter that several operators use counts once."""
    total = 0
    for place in range(scratch.first_member[stage], scratch.first_member[stage + 1]):
        operator = scratch.member[place]
        for entry in range(graph.first_parameter[operator], graph.first_parameter[operator + 1]):
            total += _size_if_new(
                graph.parameter[entry], graph.parameter_bytes[entry], stage, scratch
            )
    return total


@part_of_kernel
def _size_if_new(name: int, size_bytes: int, stage: int, scratch: Scratch) -> int:
    """By how much a name of a stage adds to what was seen: the last of equal names counts."""
    seen = scratch.size_seen[name] if scratch.stamp[name] == stage else 0
    scratch.stamp[name] = stage
    scratch.size_seen[name] = size_bytes
    return size_bytes - seen


@part_of_kernel
def _saved_bytes(graph: Graph, stage: int, scratch: Scratch) -> int:
    """What a stage keeps of a micro-batch; equal names once, those received as they came."""
    total = 0
    for place in range(scratch.first_receiver[stage], scratch.first_receiver[stage + 1]):
        producer = scratch.producer[scratch.receiver[place]]
        scratch.arrived[graph.storage[producer]] = stage
        total += graph.output_bytes[producer]
    for place in range(scratch.first_member[stage], scratch.first_member[stage + 1]):
        operator = scratch.member[place]
        for entry in range(graph.first_saved[operator], graph.first_saved[operator + 1]):
            name = graph.saved[entry]
            if scratch.arrived[name] != stage:
                total += _size_if_new(name, graph.saved_bytes[entry], stage, scratch)
    for place in range(scratch.first_sender[stage], scratch.first_sender[stage + 1]):
        producer = scratch.producer[scratch.sender[place]]
        name = graph.storage[producer]
        if scratch.arrived[name] != stage and scratch.stamp[name] != stage:
            total += _size_if_new(name, graph.kept_bytes[producer], stage, scratch)
    return total


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


Timings = tuple[Floats, Floats]
"""Cached and uncached forward and backward of every operator; shapes [2, operators]."""


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
            working_set = 2 * sums.parameter_bytes + sums.saved_bytes * scale
            share = uncached_shares(working_set, overhead.cache_bytes)
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
        graph: condensed; partitions are of its blocks.
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
        sum_cuts(self._graph, stage_of, sums)
        return Cuts(stage_of, sums, self._profile)


def _arrays(profile: Profile) -> Graph:
    operators = profile.operators
    memory = [memory_of(operator) for operator in operators]
    made = {o.id: m.made_bytes for o, m in zip(operators, memory, strict=True)}
    kept = [
        made.get(m.storage) or operator.output_bytes
        for operator, m in zip(operators, memory, strict=True)
    ]
    parameters: dict[str, int] = {}
    names: dict[str, int] = {}
    return Graph(
        *_joined(profile.readers),
        _integers(operator.output_bytes for operator in operators),
        _integers(operator.gradient_bytes for operator in operators),
        _integers(names.setdefault(m.storage, len(names)) for m in memory),
        _integers(kept),
        _integers(sum(size for _, size in parameter_gradients(each)) for each in operators),
        *_named([dict(operator.parameters) for operator in operators], parameters),
        *_named([dict(operator.saved) for operator in operators], names),
        max(len(parameters), len(names)),
    )


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, dtype=np.int64)


def _joined(groups: Iterable[Sequence[int]]) -> tuple[Integers, Integers]:
    """All groups in one array, and where each begins."""
    found = list(groups)
    first = np.cumsum([0, *map(len, found)], dtype=np.int64)
    return _integers(chain.from_iterable(found)), first


def _named(
    held: Sequence[Mapping[str, int]], names: dict[str, int]
) -> tuple[Integers, Integers, Integers]:
    """Names as numbers, sizes, and where each operator's begin."""
    numbers = [[names.setdefault(name, len(names)) for name in one] for one in held]
    joined, first = _joined(numbers)
    return joined, _integers(chain.from_iterable(one.values() for one in held)), first


def uncached_shares(working_set_bytes: Floats, cache_bytes: int) -> Floats:
    """:meth:`pipectl.profile.StageOverhead.uncached` of many stages."""
    shares: Floats = np.clip(2 * (working_set_bytes / cache_bytes - 1), 0.0, 1.0)
    return shares
