"""All cuts of a small graph under one layout: those whose step could be below the best. Compiled.

Stages are added one by one, each from one downset to a larger one. A stage whose work alone takes
as long as the best step ends the branch, and so does more work than the ranks that are left can do.
What remains of complete cuts is the least step of :mod:`pipectl.planner.proof.units`, on costs
that are never above the plan's own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled, part_of_kernel
from pipectl.planner.proof.units import FORWARD, FULL, LAST, Loads, Shape, counts, least_step_s

FOUND, VISITED = range(2)
"""Entries of what is counted."""


class Graph(NamedTuple):
    """The downsets of a graph and the values that blocks exchange.

    Args:
        downsets: bitsets by rising size, the empty one first, the full one last.
        producer: block of every value.
        users: bitset of the other blocks that read it.
        output_bytes, gradient_bytes: of a full micro-batch; shape [values].
    """

    downsets: Integers
    producer: Integers
    users: Integers
    output_bytes: Floats
    gradient_bytes: Floats


class Layout(NamedTuple):
    """Stages with replicas on ranks, and what they cost; arrays by downset are sums over it.

    Args:
        time_s: a micro-batch at speed 1; shape [FORWARD or BACKWARD, stages, downsets].
        stage_s: what every stage takes besides; shape [FORWARD or BACKWARD, stages].
        least_s: work of a step, wherever it is done; shape [downsets].
        capacity: sum of the speeds from each stage on; shape [stages + 1].
        bytes_held, bytes_summed: parameters, and their gradients, by downset.
        update_s_per_byte: of the optimizer at speed 1.
        reduce_s: constant and per byte; shape [2, stages].
        speed: of every unit.
        share: of a full micro-batch that a unit works on; shape [FULL or LAST, units].
        portion: of a message that two units exchange; shape [FULL or LAST, units, units].
        s_per_byte, late_s: of the links between units; shape [units, units].
        node: of every unit.
        cores: of every node.
    """

    time_s: Floats
    stage_s: Floats
    least_s: Floats
    capacity: Floats
    bytes_held: Floats
    bytes_summed: Floats
    update_s_per_byte: float
    reduce_s: Floats
    speed: Floats
    share: Floats
    portion: Floats
    s_per_byte: Floats
    late_s: Floats
    node: Integers
    cores: Integers


class Promising(NamedTuple):
    """Cuts and orders that could be better than the best.

    Args:
        least_s: of their steps.
        chain: ends of the stages as places among the downsets; shape [room, stages].
        order: which warm-up.
        counts: how many there are (more than room if some are lost), and cuts looked at.
    """

    least_s: Floats
    chain: Integers
    order: Integers
    counts: Integers


@compiled
def explore(
    graph: Graph, shape: Shape, layout: Layout, orders: Integers,
    best_s: float, begin: int, looks: int, found: Promising,
) -> int:  # fmt: skip
    """Look at the cuts whose first stage ends at ``begin`` or behind it.

    Args:
        orders: warm-ups; shape [orders, stages].
        best_s: steps of at least so much are of no interest.
        looks: at stages, after which this returns.
        found: empty.

    Returns:
        The ``begin`` to go on with; the number of downsets if everything was looked at.
    """
    stages, full = len(shape.first) - 1, len(graph.downsets) - 1
    loads = _no_loads(layout, stages, len(shape.stage))
    chain = np.zeros(stages + 1, np.int64)  # chain[s]: where stage s begins, chain[s + 1]: ends
    level = 0
    chain[1] = (full if stages == 1 else begin) - 1
    while level >= 0:
        chain[level + 1] += 1
        end = chain[level + 1]
        if level == 0 and (end > full or (stages > 1 and found.counts[VISITED] > looks)):
            return int(min(end, full + 1))
        if end > full:
            level -= 1
            continue
        found.counts[VISITED] += 1
        if _could_do(graph, shape, layout, level, chain, best_s):
            if level == stages - 1:
                _complete(graph, shape, layout, orders, chain, loads, best_s, found)
            else:
                level += 1
                chain[level + 1] = full - 1 if level == stages - 1 else chain[level]
    return full + 1


@compiled
def _no_loads(layout: Layout, stages: int, units: int) -> Loads:
    """Room for what the units take."""
    return Loads(
        np.zeros((2, 2, units), np.float64),
        np.full((2, units, units), -1.0),
        layout.late_s,
        np.zeros(stages, np.float64),
        0.0,
    )


@part_of_kernel
def _could_do(
    graph: Graph, shape: Shape, layout: Layout, stage: int, chain: Integers, best_s: float
) -> bool:
    """Whether there is such a stage, and it, and the rest behind it, alone take less than the best
    step."""
    begin, end = chain[stage], chain[stage + 1]
    if begin == end or graph.downsets[begin] & ~graph.downsets[end]:
        return False
    rest_s = layout.least_s[len(layout.least_s) - 1] - layout.least_s[end]
    if rest_s > 0.0 and rest_s >= best_s * layout.capacity[stage + 1]:
        return False
    work_s = 0.0
    for kind in range(2):
        work_s += _stage_s(layout, kind, stage, begin, end)
    for unit in range(shape.first[stage], shape.first[stage + 1]):
        full, last = counts(shape, unit)
        shares = full * layout.share[FULL, unit] + last * layout.share[LAST, unit]
        if work_s * shares / layout.speed[unit] >= best_s:
            return False
    return True


@part_of_kernel
def _stage_s(layout: Layout, kind: int, stage: int, begin: int, end: int) -> float:
    """A forward or backward of a whole micro-batch at speed 1."""
    sums = layout.time_s[kind, stage]
    work_s = sums[end] - sums[begin]
    more_s = layout.stage_s[kind, stage] if kind == FORWARD or work_s > 0.0 else 0.0
    return float(max(0.0, work_s) + more_s)


@compiled
def _complete(
    graph: Graph,
    shape: Shape,
    layout: Layout,
    orders: Integers,
    chain: Integers,
    loads: Loads,
    best_s: float,
    found: Promising,
) -> None:
    """Keep a complete cut with every order in which its step could be below the best."""
    update_s = _fill_work(shape, layout, chain, loads)
    if _busiest_node_s(shape, layout, loads) + update_s >= best_s:
        return
    _fill_messages(graph, shape, layout, chain, loads)
    loads = Loads(loads.work_s, loads.hold_s, loads.late_s, loads.reduce_s, update_s)
    for order in range(len(orders)):
        least_s = least_step_s(shape, loads, orders[order], best_s)
        if least_s < best_s:
            place = found.counts[FOUND]
            found.counts[FOUND] += 1
            if place < len(found.least_s):
                found.least_s[place] = least_s
                found.order[place] = order
                for stage in range(orders.shape[1]):
                    found.chain[place, stage] = chain[stage + 1]


@part_of_kernel
def _fill_work(shape: Shape, layout: Layout, chain: Integers, loads: Loads) -> float:
    """Computations and sums of gradients; returns the longest update."""
    update_s = 0.0
    for stage in range(len(shape.first) - 1):
        begin, end = chain[stage], chain[stage + 1]
        held = max(0.0, layout.bytes_held[end] - layout.bytes_held[begin])
        summed = max(0.0, layout.bytes_summed[end] - layout.bytes_summed[begin])
        loads.reduce_s[stage] = layout.reduce_s[0, stage] + summed * layout.reduce_s[1, stage]
        for unit in range(shape.first[stage], shape.first[stage + 1]):
            speed = layout.speed[unit]
            update_s = max(update_s, held * layout.update_s_per_byte / speed)
            for kind in range(2):
                work_s = _stage_s(layout, kind, stage, begin, end) / speed
                for size in range(2):
                    loads.work_s[size, kind, unit] = work_s * layout.share[size, unit]
    return update_s


@compiled
def _busiest_node_s(shape: Shape, layout: Layout, loads: Loads) -> float:
    """Work of a node over its cores."""
    work = np.zeros(len(layout.cores), np.float64)
    for unit in range(len(shape.stage)):
        full, last = counts(shape, unit)
        for kind in range(2):
            full_s, last_s = loads.work_s[FULL, kind, unit], loads.work_s[LAST, kind, unit]
            work[layout.node[unit]] += full * full_s + last * last_s
    most = 0.0
    for node in range(len(work)):
        most = max(most, work[node] / layout.cores[node])
    return most


@compiled
def _fill_messages(
    graph: Graph, shape: Shape, layout: Layout, chain: Integers, loads: Loads
) -> None:
    """How long the links between units are held."""
    stages = len(shape.first) - 1
    sent = np.full((stages, stages), -1.0)
    for value in range(len(graph.producer)):
        _fill_routes(graph, chain, value, sent)
    for one in range(len(shape.stage)):
        for other in range(len(shape.stage)):
            sizes = sent[shape.stage[one], shape.stage[other]]
            for size in range(2):
                part = layout.portion[size, one, other]
                hold_s = sizes * part * layout.s_per_byte[one, other]
                loads.hold_s[size, one, other] = hold_s if sizes >= 0.0 and part > 0.0 else -1.0


@part_of_kernel
def _fill_routes(graph: Graph, chain: Integers, value: int, sent: Floats) -> None:
    """Add the messages of one value.

    The gradient of the first stage that reads it goes straight back; those of later ones perhaps by
    way of it, so here they only must not be later.
    """
    home, first = -1, -1
    producer, users = 1 << graph.producer[value], graph.users[value]
    for stage in range(len(chain) - 1):
        inside = graph.downsets[chain[stage + 1]] & ~graph.downsets[chain[stage]]
        if inside & producer:
            home = stage
        elif inside & users and home >= 0:
            sent[home, stage] = max(0.0, sent[home, stage]) + graph.output_bytes[value]
            if graph.gradient_bytes[value] > 0.0:
                more = graph.gradient_bytes[value] if first < 0 else 0.0
                sent[stage, home] = max(0.0, sent[stage, home]) + more
                first = stage
