"""The least that one step of a 1F1B-family schedule takes, replica by replica. Compiled.

A *unit* is one replica of a stage on its rank; units are numbered stage by stage. As in
:mod:`pipectl.planner.bounding.recurrence`, the actions of all units are taken in one order that
agrees with every dependency, so each end follows from ends that are known. A message begins once it
is made, once the one before it has left the link, and once its receive is posted: when the receiver
turns to the message before. What units share (cores, links, the order in which sends are awaited)
is left out: all of it can only delay actions further, so the simulated step is never shorter.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled, part_of_kernel

FULL, LAST = range(2)
"""Micro-batches by size: all but the last, and the last."""
FORWARD, BACKWARD = range(2)


class Shape(NamedTuple):
    """Who works on what.

    Args:
        first: unit at which each stage begins, and their number; shape [stages + 1].
        stage: of every unit.
        period, phase: a unit works on the micro-batches i with i % period == phase.
        micro_batches: of a step.
    """

    first: Integers
    stage: Integers
    period: Integers
    phase: Integers
    micro_batches: int


class Loads(NamedTuple):
    """What the units take.

    Args:
        work_s: shape [FULL or LAST, FORWARD or BACKWARD, units].
        hold_s: of a message from one unit to another, to a later stage an activation, to an earlier
            one a gradient; negative where there is none; shape [FULL or LAST, units, units].
        late_s: latency; shape [units, units].
        reduce_s: of the sum of gradients of every stage.
        update_s: of the slowest optimizer step.
    """

    work_s: Floats
    hold_s: Floats
    late_s: Floats
    reduce_s: Floats
    update_s: float


class Clocks(NamedTuple):
    """What has happened so far.

    Args:
        ends: of the last action of every unit.
        left_s: work that a unit has still to do.
        made: ends of forwards of this turn; and of backwards, by micro-batch modulo the ring;
            shape [units, ring + 1], the forwards last.
        free, posted: when the link of two units is free and its next receive posted.
    """

    ends: Floats
    left_s: Floats
    made: Floats
    free: Floats
    posted: Floats


@compiled
def least_step_s(shape: Shape, loads: Loads, warm_up: Integers, best_s: float) -> float:
    """No execution of the plan takes less; infinite as soon as it is seen to reach ``best_s``.

    Args:
        warm_up: of every stage; never rises.
    """
    stages, units, last = len(warm_up), len(shape.stage), shape.micro_batches - 1
    ring = min(max(warm_up[0], 1), last + 1) + 1
    clocks = Clocks(
        np.zeros(units, np.float64),
        np.zeros(units, np.float64),
        np.zeros((units, ring + 1), np.float64),
        np.zeros((units, units), np.float64),
        np.zeros((units, units), np.float64),
    )
    _fill_left(shape, loads, clocks)
    most_s = best_s - loads.update_s
    for turn in range(last + ring):
        for stage in range(stages - 1, -1, -1):
            index = turn - min(max(warm_up[stage], 1), last + 1)
            if 0 <= index <= last:
                slot = index % ring
                if not _act(shape, loads, clocks, stage, index, BACKWARD, slot, most_s):
                    return inf
        if turn <= last:
            for stage in range(stages):
                if not _act(shape, loads, clocks, stage, turn, FORWARD, ring, most_s):
                    return inf
    ready_s = 0.0
    for unit in range(units):
        ready_s = max(ready_s, clocks.ends[unit] + loads.reduce_s[shape.stage[unit]])
    return ready_s + loads.update_s


@part_of_kernel
def counts(shape: Shape, unit: int) -> tuple[int, int]:
    """Full micro-batches that a unit works on, and last ones: none or one."""
    last = shape.micro_batches - 1
    period, phase = shape.period[unit], shape.phase[unit]
    mine = 0 if phase > last else (last - phase) // period + 1
    ends_it = int(last % period == phase)
    return mine - ends_it, ends_it


@part_of_kernel
def _fill_left(shape: Shape, loads: Loads, clocks: Clocks) -> None:
    """The work of every unit, and the sum of gradients behind it."""
    for unit in range(len(shape.stage)):
        full, last = counts(shape, unit)
        full_s = loads.work_s[FULL, FORWARD, unit] + loads.work_s[FULL, BACKWARD, unit]
        last_s = loads.work_s[LAST, FORWARD, unit] + loads.work_s[LAST, BACKWARD, unit]
        left_s = full * full_s + last * last_s
        clocks.left_s[unit] = left_s + loads.reduce_s[shape.stage[unit]]


@part_of_kernel
def _act(
    shape: Shape,
    loads: Loads,
    clocks: Clocks,
    stage: int,
    index: int,
    kind: int,
    slot: int,
    most_s: float,
) -> bool:
    """One action of every unit of a stage that has one; whether all can still end in time."""
    size = LAST if index == shape.micro_batches - 1 else FULL
    for unit in range(shape.first[stage], shape.first[stage + 1]):
        if index % shape.period[unit] != shape.phase[unit]:
            continue
        before_s = clocks.ends[unit]
        ready_s = before_s
        begin, end = 0, shape.first[stage]
        if kind == BACKWARD:
            begin, end = shape.first[stage + 1], len(shape.stage)
        for other in range(begin, end):
            hold_s = loads.hold_s[size, other, unit]
            if hold_s >= 0.0 and index % shape.period[other] == shape.phase[other]:
                start_s = max(clocks.made[other, slot], clocks.free[other, unit])
                start_s = max(start_s, clocks.posted[other, unit])
                clocks.free[other, unit] = start_s + hold_s
                clocks.posted[other, unit] = before_s
                ready_s = max(ready_s, start_s + hold_s + loads.late_s[other, unit])
        work_s = loads.work_s[size, kind, unit]
        clocks.ends[unit] = ready_s + work_s
        clocks.made[unit, slot] = clocks.ends[unit]
        clocks.left_s[unit] -= work_s
        if clocks.ends[unit] + clocks.left_s[unit] >= most_s:
            return False
    return True
