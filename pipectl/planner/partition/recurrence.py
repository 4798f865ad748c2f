"""The time of one step of a 1F1B-family schedule, stage by stage and without events.

The schedules of this family are one order of all actions: in turn t every stage s, last stage
first, does the backward of micro-batch t - warm_up[s], then every stage, first stage first, the
forward of micro-batch t. Three stages, warm-up (3, 2, 1)::

    turn   0     1     2     3        4
    s 2    0     1     2   a 3      b 4
    s 1    0     1   . 2   a 3      b 4         digits: forwards, letters: backwards
    s 0    0     1     2   a 3      b 4

Where the warm-up never rises with the stage, everything an action waits for stands before it, so
each end follows from ends that are known: one pass of (stages + transfers) x micro-batches steps.
It equals the event simulation of the same plan where stages send to their neighbours only, no two
transfers share a link and messages are shorter than computations; others may begin later there,
because receives are posted only a little ahead.

In the steady state all ends move by the same time a turn (a max-plus system at its eigenvalue);
once that held for a whole cycle of the backwards in flight, the turns up to the last micro-batch
are skipped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled, part_of_kernel

SAME = 1e-13
"""Two advances differ by rounding alone if their difference is below this share of the time."""


class Stages(NamedTuple):
    """The stages in order; seconds of one full micro-batch, replicas folded in.

    Args:
        forward_s, backward_s: of one micro-batch.
        reduce_s: of the sum of gradients, after the stage's last backward.
        update_s: of the optimizer, which begins on all stages at once.
        warm_up: forwards before the first backward; never rises.
    """

    forward_s: Floats
    backward_s: Floats
    reduce_s: Floats
    update_s: Floats
    warm_up: Integers


class Transfers(NamedTuple):
    """The messages of one direction, by rising source; each has a link of its own.

    Args:
        hold_s: time in which the link takes no other message, for a full micro-batch.
        late_s: latency; what passes between the end of this and the arrival.
    """

    source: Integers
    target: Integers
    hold_s: Floats
    late_s: Floats


class _Clocks(NamedTuple):
    """When stages and links are done so far.

    Args:
        ends: of the last action of every stage.
        ahead, behind: of the last message of every activation and gradient transfer.
        arrived: of the inputs of every stage in this turn.
        back: of the gradients of every stage, by micro-batch modulo the size of the ring.
    """

    ends: Floats
    ahead: Floats
    behind: Floats
    arrived: Floats
    back: Floats


@compiled
def step_s(
    stages: Stages,
    activations: Transfers,
    gradients: Transfers,
    micro_batches: int,
    last_share: float,
    ends: Floats,
) -> float:
    """Time of a step.

    Args:
        activations: to later stages.
        gradients: to earlier stages.
        last_share: size of the last micro-batch relative to the others.
        ends: zeros, one per stage; filled in with when each stage is ready to update.
    """
    depth = np.empty(len(ends), np.int64)  # no more than there are micro-batches
    for stage in range(len(ends)):
        depth[stage] = min(max(stages.warm_up[stage], 1), micro_batches)
    ring, last = depth[0] + 1, micro_batches - 1
    clocks = _Clocks(
        ends,
        np.zeros(len(activations.source), np.float64),
        np.zeros(len(gradients.source), np.float64),
        np.zeros(len(ends), np.float64),
        np.zeros((len(ends), ring), np.float64),
    )
    before = np.zeros(len(ends) + len(clocks.ahead) + len(clocks.behind), np.float64)
    ahead, behind = _offsets(activations.source, len(ends)), _offsets(gradients.source, len(ends))
    steady, turn = 0, 0
    while turn < last + ring:
        _backwards(turn, depth, last, last_share, stages, gradients, behind, clocks)
        if turn <= last:
            share = last_share if turn == last else 1.0
            for stage in range(len(ends)):
                _forward(stage, share, stages, activations, ahead, clocks)
        if ring <= turn < last - 1 - ring:
            advance_s = _advance(before, clocks)
            steady = steady + 1 if advance_s >= 0.0 else 0
            if steady > ring:
                turn += _skip(last - 1 - turn, advance_s, clocks)
        turn += 1
    return _updated_s(stages, ends)


@part_of_kernel
def _updated_s(stages: Stages, ends: Floats) -> float:
    """When the slowest update is over, which begins when the last stage is ready."""
    ready_s = update_s = 0.0
    for stage in range(len(ends)):
        ends[stage] += stages.reduce_s[stage]
        ready_s = max(ready_s, ends[stage])
        update_s = max(update_s, stages.update_s[stage])
    return ready_s + update_s


@part_of_kernel
def _backwards(
    turn: int,
    depth: Integers,
    last: int,
    last_share: float,
    stages: Stages,
    gradients: Transfers,
    first: Integers,
    clocks: _Clocks,
) -> None:
    """The backwards of one turn, the last stage first, and their gradients on their way."""
    ends, behind, back = clocks.ends, clocks.behind, clocks.back
    ring = depth[0] + 1
    for stage in range(len(depth) - 1, -1, -1):
        index = turn - depth[stage]
        if index < 0 or index > last:
            continue
        share, slot = last_share if index == last else 1.0, index % ring
        ends[stage] = max(ends[stage], back[stage, slot]) + stages.backward_s[stage] * share
        back[stage, slot] = 0.0
        for way in range(first[stage], first[stage + 1]):
            behind[way] = max(behind[way], ends[stage]) + gradients.hold_s[way] * share
            target = gradients.target[way]
            back[target, slot] = max(back[target, slot], behind[way] + gradients.late_s[way])


@part_of_kernel
def _forward(
    stage: int,
    share: float,
    stages: Stages,
    activations: Transfers,
    first: Integers,
    clocks: _Clocks,
) -> None:
    """One forward of a stage, and its activations on their way."""
    ends, ahead, arrived = clocks.ends, clocks.ahead, clocks.arrived
    ends[stage] = max(ends[stage], arrived[stage]) + stages.forward_s[stage] * share
    arrived[stage] = 0.0
    for way in range(first[stage], first[stage + 1]):
        ahead[way] = max(ahead[way], ends[stage]) + activations.hold_s[way] * share
        target = activations.target[way]
        arrived[target] = max(arrived[target], ahead[way] + activations.late_s[way])


@part_of_kernel
def _advance(before: Floats, clocks: _Clocks) -> float:
    """By how much all clocks moved since the last call, -1 if not alike; ``before`` is renewed."""
    count, more = len(clocks.ends), len(clocks.ends) + len(clocks.ahead)
    step = clocks.ends[0] - before[0]
    alike = True
    for clock in range(len(before)):
        if clock < count:
            now = clocks.ends[clock]
        elif clock < more:
            now = clocks.ahead[clock - count]
        else:
            now = clocks.behind[clock - more]
        alike = alike and abs(now - before[clock] - step) <= SAME * now
        before[clock] = now
    return step if alike else -1.0


@part_of_kernel
def _skip(turns: int, advance_s: float, clocks: _Clocks) -> int:
    """Let as many whole rings of turns pass as fit; returns the number of turns."""
    ring: int = clocks.back.shape[1]
    passed = turns // ring * ring
    shift = passed * advance_s
    for way in range(len(clocks.ahead)):
        clocks.ahead[way] += shift
    for way in range(len(clocks.behind)):
        clocks.behind[way] += shift
    for stage in range(len(clocks.ends)):
        clocks.ends[stage] += shift
        for slot in range(ring):
            if clocks.back[stage, slot] > 0.0:
                clocks.back[stage, slot] += shift
    return passed


@compiled
def _offsets(source: Integers, count: int) -> Integers:
    """Where the transfers of every stage begin in a list that rises by source."""
    first = np.zeros(count + 1, np.int64)
    for way in range(len(source)):
        first[source[way] + 1] += 1
    for stage in range(count):
        first[stage + 1] += first[stage]
    return first
