"""Where the local search begins: plans whose fill and drain is least under a cap on the load.

A pipeline takes about its longest stage or link times the micro-batches, plus one micro-batch's way
through all stages and back. For a cap on the first, the dynamic programme finds the plan with the
shortest way; a rising cap gives plans from balanced with many stages to short with few.

    way[state, devices, replicas of the last stage]
        = least over the stage's start and the replicas before it of
          way[start, devices - replicas, replicas before] + stage + messages over the border
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled
from pipectl.planner.hybrid.model import Model
from pipectl.planner.hybrid.moves import Sketch

FIRST_SLACKS = (1.1, 1.5)
SLACKS = (1.03, 1.06, 1.2, 1.3, 1.8, 2.5, 5.0, 1e9)
"""Caps, relative to work that is spread evenly over all devices: a first look, and the others."""
REDUCED = 1.1
"""How far above the cap a stage may be with its reduction, part of which later stages hide."""
MOST_STATES = 48
"""States the programme cuts at: in each part of the work, the ones with the smallest messages."""
MOST_DEVICES = 48
"""Beyond, the programme takes too long, and only even plans are seeds."""


def first_seeds(model: Model) -> list[Sketch]:
    """Plans that show roughly what a micro-batch size is worth, without duplicates."""
    states = _sampled(model, MOST_STATES)
    return _wanted(model, [*_even(model, states), *_shortest(model, states, FIRST_SLACKS)])


def more_seeds(model: Model) -> list[Sketch]:
    """Further plans to begin with."""
    states = _sampled(model, MOST_STATES)
    return _wanted(model, _shortest(model, states, SLACKS))


def _wanted(model: Model, plans: Iterable[Sketch]) -> list[Sketch]:
    """Those with the right number of stages, each once."""
    return [p for p in dict.fromkeys(plans) if model.stages in (0, len(p[1]))]


def _sampled(model: Model, most: int) -> Integers:
    """At most about ``most`` states that keep both ends and cover the work evenly."""
    costs = model.costs
    count = len(costs.update_s)
    if count <= most:
        return np.arange(count)
    work = costs.forward_s[0] + costs.backward_s[0]
    part = np.floor(work / max(work[-1], 1e-30) * (most - 2) / 2).astype(np.int64)
    order = np.lexsort((costs.activation_bytes + costs.gradient_bytes, part))
    rank = np.arange(count) - np.searchsorted(part[order], part[order])
    return np.unique(np.concatenate([order[rank < 2], [0, count - 1]]))


def _even(model: Model, states: Integers) -> Iterator[Sketch]:
    """Equal replicas on every stage, equal shares of the work: for every number of stages."""
    work = (model.costs.forward_s[0] + model.costs.backward_s[0])[states]
    for stages in range(1, min(model.layout.devices, len(states) - 1) + 1):
        counts = np.flatnonzero(model.layout.replicas * stages <= model.layout.devices)
        pick = min(int(counts[-1]), model.most)
        targets = work[-1] * np.arange(stages + 1) / stages
        near = [int(np.argmin(np.abs(work - target))) for target in targets]
        cuts = tuple(int(state) for state in states[[0, *near[1:-1], len(states) - 1]])
        if all(model.follows[a, b] for a, b in pairwise(cuts)):
            yield cuts, (pick,) * stages


def _shortest(model: Model, states: Integers, slacks: Sequence[float]) -> Iterator[Sketch]:
    """The shortest way under every cap."""
    costs = model.costs
    even_s = (costs.forward_s[0, -1] + costs.backward_s[0, -1]) / model.layout.devices
    for slack in slacks if model.layout.devices <= MOST_DEVICES else ():
        trace = shortest_ways(model, states, even_s * slack)
        plan = _read(model, states, trace)
        if plan is not None:
            yield plan


def _read(model: Model, states: Integers, trace: Integers) -> Sketch | None:
    """The plan that the programme's trace ends in, None if no plan is under the cap."""
    state, devices, pick = (int(value) for value in trace[-1, 0, 0])
    if pick < 0:
        return None
    cuts, picks = [int(states[state])], []
    while state:
        picks.append(pick)
        before = trace[state, devices, pick]
        devices -= int(model.layout.replicas[pick])
        state, pick = int(before[0]), int(before[1])
        cuts.append(int(states[state]))
    return tuple(cuts[::-1]), tuple(picks[::-1])


@compiled
def shortest_ways(model: Model, states: Integers, cap_s: float) -> Integers:
    """The trace of the programme: (start, pick of the stage before) by state, devices, pick.

    The last row of the array's first axis holds the best end: (state, devices, pick) or pick -1.
    """
    devices, picks, last = model.layout.devices, model.most + 1, len(states) - 1
    way = np.full((last + 1, devices + 1, picks), np.inf)
    trace = np.full((last + 2, devices + 1, picks, 3), -1)
    for end in range(1, last + 1):
        for start in range(end):
            if model.follows[states[start], states[end]]:
                for pick in range(picks):
                    for used in range(model.layout.replicas[pick], devices + 1):
                        _extend(model, states, start, end, pick, used, cap_s, way, trace)
    best = np.inf
    for used in range(1, devices + 1):
        for pick in range(picks):
            if way[last, used, pick] < best:
                best = way[last, used, pick]
                trace[last + 1, 0, 0, 0] = last
                trace[last + 1, 0, 0, 1] = used
                trace[last + 1, 0, 0, 2] = pick
    return trace


@compiled
def _extend(
    model: Model,
    states: Integers,
    start: int,
    end: int,
    pick: int,
    used: int,
    cap_s: float,
    way: Floats,
    trace: Integers,
) -> None:
    """The shortest way to one entry of the programme with its last stage from ``start``."""
    replicas = model.layout.replicas
    place = used - replicas[pick]
    stage = _stage_s(model, states[start], states[end], pick, place, cap_s)
    if stage == np.inf or (start == 0 and place > 0):
        return
    for before in range(way.shape[2] if start else 1):
        length = stage
        if start:
            length += way[start, place, before]
            if length < way[end, used, pick]:
                begin = place - replicas[before]
                length += _border_s(model, states[start], begin, before, pick, cap_s)
        if length < way[end, used, pick]:
            way[end, used, pick] = length
            trace[end, used, pick, 0] = start
            trace[end, used, pick, 1] = before


@compiled
def _stage_s(model: Model, start: int, end: int, pick: int, place: int, cap_s: float) -> float:
    """Forward and backward of a stage; infinite if it is above the cap or does not fit."""
    costs, layout = model.costs, model.layout
    begin = place % layout.slowness.shape[0]
    work = costs.forward_s[pick, end] - costs.forward_s[pick, start]
    work += costs.backward_s[pick, end] - costs.backward_s[pick, start]
    work += costs.stage_s[0] + costs.stage_s[1]
    stage = work * layout.slowness[begin, pick]
    if stage > cap_s:
        return np.inf
    held = costs.saved_bytes[end] - costs.saved_bytes[start]
    need = costs.resident_bytes[pick, end] - costs.resident_bytes[pick, start]
    if need + held / layout.replicas[pick] > layout.limit_bytes[begin, pick]:
        return np.inf
    size = costs.reduced_bytes[end] - costs.reduced_bytes[start]
    reduce = layout.reduce_late_s[begin, pick] + size * layout.reduce_s_per_byte[begin, pick]
    return stage if stage + reduce / model.micro_batches <= cap_s * REDUCED else np.inf


@compiled
def _border_s(model: Model, state: int, begin: int, before: int, pick: int, cap_s: float) -> float:
    """Messages there and back; infinite if one of them is above the cap."""
    costs, layout = model.costs, model.layout
    row = begin % layout.slowness.shape[0]
    rate, late = layout.s_per_byte[row, before, pick], layout.late_s[row, before, pick]
    there, back = costs.activation_bytes[state] * rate, costs.gradient_bytes[state] * rate
    return there + back + 2 * late if max(there, back) <= cap_s else np.inf
