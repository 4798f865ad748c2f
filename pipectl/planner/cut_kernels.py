"""Inner loops of :mod:`pipectl.planner.cuts`, compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl.compiled import compiled

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ACTIVATION, GRADIENT = 0, 1
RECEIVED, SENT, GRADIENTS_RECEIVED, GRADIENTS_SENT = range(4)
"""Columns of the numbers of values."""


class Graph(NamedTuple):
    """What operators read, hold and send; names are numbers.

    Args:
        reader, first_reader: readers of operator i are ``reader[first_reader[i]:...[i + 1]]``.
        output_bytes, gradient_bytes: of every operator's messages.
        storage: name of the memory that each value lies in.
        kept_bytes: what the stage of an operator keeps of its value if that is sent.
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
        parameter_bytes, saved_bytes: shape [partitions, stages].
        values: numbers of values that enter and leave; shape [partitions, stages, 4].
        source, target, size_bytes: transfers; of every partition activations, then gradients, each
            by rising source and target.
        first: where those of partition p begin, at 2 p and 2 p + 1; shape [2 * partitions + 1].
    """

    parameter_bytes: Integers
    saved_bytes: Integers
    values: Integers
    source: Integers
    target: Integers
    size_bytes: Integers
    first: Integers


class _Scratch(NamedTuple):
    """Room for one partition.

    Args:
        head, following, target, size_bytes: lists of transfers by kind and source.
        producer, home, consumer: of every activation route.
        used: transfers and routes so far.
        stamp: of stages or names, where they were last seen.
        size_seen: of every name.
    """

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


@compiled
def sum_cuts(graph: Graph, stage_of: Integers, sums: Sums) -> None:
    """Fill in what every partition needs.

    Args:
        stage_of: of every operator; shape [partitions, operators].
    """
    stages, edges = sums.parameter_bytes.shape[1], len(graph.reader)
    longest = max(stages, graph.names)
    sums.first[0] = 0
    for partition in range(len(stage_of)):
        scratch = _Scratch(
            np.full((2, stages), -1, np.int64),
            np.empty(2 * edges, np.int64),
            np.empty(2 * edges, np.int64),
            np.empty(2 * edges, np.int64),
            np.empty(edges, np.int64),
            np.empty(edges, np.int64),
            np.empty(edges, np.int64),
            np.zeros(2, np.int64),
            np.full(longest, -1, np.int64),
            np.full(longest, -1, np.int64),
            np.zeros(longest, np.int64),
        )
        home = stage_of[partition]
        for producer in range(len(home)):
            _send(graph, producer, home, sums.values[partition], scratch)
        _flatten(partition, sums, scratch)
        members, first = _by_stage(home, stages)
        scratch.stamp[:] = -1
        for stage in range(stages):
            inside = members[first[stage] : first[stage + 1]]
            sums.parameter_bytes[partition, stage] = _parameter_bytes(graph, inside, stage, scratch)
        scratch.stamp[:] = -1
        senders, first_sender = _by_stage(scratch.home[: scratch.used[1]], stages)
        receivers, first_receiver = _by_stage(scratch.consumer[: scratch.used[1]], stages)
        for stage in range(stages):
            sums.saved_bytes[partition, stage] = _saved_bytes(
                graph,
                members[first[stage] : first[stage + 1]],
                receivers[first_receiver[stage] : first_receiver[stage + 1]],
                senders[first_sender[stage] : first_sender[stage + 1]],
                stage,
                scratch,
            )


@compiled
def _send(
    graph: Graph, producer: int, stage_of: Integers, values: Integers, scratch: _Scratch
) -> None:
    """The routes of one value, and of its gradient; see :func:`pipectl.graph.routes`."""
    begin, end = graph.first_reader[producer], graph.first_reader[producer + 1]
    home = stage_of[producer]
    before, crosses, chained = home, False, True
    for edge in range(begin, end):
        use = stage_of[graph.reader[edge]]
        crosses |= use != home
        chained &= before <= use
        before = use
    if not crosses:
        return
    back = graph.gradient_bytes[producer]
    previous = home
    for edge in range(begin, end):
        use = stage_of[graph.reader[edge]]
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
            values[use, RECEIVED] += 1
            values[use, GRADIENTS_SENT] += 1
            values[target, GRADIENTS_RECEIVED] += 1
            previous = use
    if back > 0:
        values[home, SENT] += 1


@compiled
def _add_message(kind: int, source: int, target: int, size_bytes: int, scratch: _Scratch) -> None:
    """Add to the transfer between two stages; the list of a source rises by target."""
    before, at = -1, scratch.head[kind, source]
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
        scratch.head[kind, source] = new
    else:
        scratch.following[before] = new


@compiled
def _flatten(partition: int, sums: Sums, scratch: _Scratch) -> None:
    """The lists of transfers one after the other."""
    place = sums.first[2 * partition]
    for kind in range(2):
        for source in range(scratch.head.shape[1]):
            at = scratch.head[kind, source]
            while at >= 0:
                sums.source[place] = source
                sums.target[place] = scratch.target[at]
                sums.size_bytes[place] = scratch.size_bytes[at]
                place += 1
                at = scratch.following[at]
        sums.first[2 * partition + kind + 1] = place


@compiled
def _by_stage(stage_of: Integers, stages: int) -> tuple[Integers, Integers]:
    """Indices by stage, rising within each, and where each stage begins."""
    first = np.zeros(stages + 1, np.int64)
    for index in range(len(stage_of)):
        first[stage_of[index] + 1] += 1
    for stage in range(stages):
        first[stage + 1] += first[stage]
    place = first.copy()
    found = np.empty(len(stage_of), np.int64)
    for index in range(len(stage_of)):
        stage = stage_of[index]
        found[place[stage]] = index
        place[stage] += 1
    return found, first


@compiled
def _parameter_bytes(graph: Graph, inside: Integers, stage: int, scratch: _Scratch) -> int:
    """Of one stage; a parameter that several operators use counts once."""
    total = 0
    for operator in inside:
        for entry in range(graph.first_parameter[operator], graph.first_parameter[operator + 1]):
            name, size = graph.parameter[entry], graph.parameter_bytes[entry]
            total += size
            if scratch.stamp[name] == stage:
                total -= scratch.size_seen[name]
            scratch.stamp[name] = stage
            scratch.size_seen[name] = size
    return total


@compiled
def _saved_bytes(
    graph: Graph,
    inside: Integers,
    received: Integers,
    sent: Integers,
    stage: int,
    scratch: _Scratch,
) -> int:
    """What a stage keeps of a micro-batch; equal names once, those received as they came."""
    total = 0
    for route in received:
        producer = scratch.producer[route]
        scratch.arrived[graph.storage[producer]] = stage
        total += graph.output_bytes[producer]
    for operator in inside:
        for entry in range(graph.first_saved[operator], graph.first_saved[operator + 1]):
            name, size = graph.saved[entry], graph.saved_bytes[entry]
            if scratch.arrived[name] == stage:
                continue
            total += size
            if scratch.stamp[name] == stage:
                total -= scratch.size_seen[name]
            scratch.stamp[name] = stage
            scratch.size_seen[name] = size
    for route in sent:
        producer = scratch.producer[route]
        name = graph.storage[producer]
        if scratch.arrived[name] != stage and scratch.stamp[name] != stage:
            scratch.stamp[name] = stage
            total += graph.kept_bytes[producer]
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
