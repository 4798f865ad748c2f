"""The dynamic programme: the best chain of stages over all downsets of a space, from the end.

    best[start, devices after and of it] = best over (end, devices, mode) of
        the stage from start to end, joined with best[end, devices after it]

Built from the end of the pipeline, where the micro-batches in flight are known. A chain is judged
by its largest load, by one micro-batch's way through all stages and back while no load is above a
cap, or by the largest memory. Over all downsets it is exact (Tarnawski et al., "Efficient
algorithms for device placement of DNN graph operators", NeurIPS 2020, solve the first objective
this way); over a sample of them it is the best among the chains of the sample. Ties go to the chain
that was met first, so the result is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl.arrays import Floats, Integers, Words
from pipectl.compiled import compiled, part_of_kernel
from pipectl.planner.partition.cost_table import CostTable
from pipectl.planner.partition.cut_space import CutSpace

LOAD, LATENCY, MEMORY = range(3)
"""What a chain is judged by."""
FREE, ADDED, OVERLAPPED = range(3)
"""How messages count as load: not at all, on top of the compute, or if they take longer."""
KEEP, RECOMPUTE = range(2)
"""What a stage does with what its backward needs."""
SUMMED = 1.1
"""How far above the cap a stage may be with its sum of gradients, part of which others hide."""
STEPS = 10**8
"""Of the inner loop between two looks at the time."""

Check = Callable[[], None]
"""Called now and then; raises to end the search."""


class Devices(NamedTuple):
    """Ways for a stage to take devices. A *tally* says which are taken, from the end.

    Args:
        following: the tally after a stage in each way, -1 if there is none; shape [tallies, ways].
        row: of the costs for the number of replicas; shape [ways].
        replicas: shape [ways].
        slowness: of the slowest replica, relative to the profile's device; by tally, shape
            [tallies or 1, ways].
        limit_bytes: of the smallest; of the same shape.
        group: states are told apart by the group of their first stage's way; shape [ways].
        late_s, s_per_byte: of messages from a stage to a later one; by tally, way and group of the
            later one, each axis of length 1 if it makes no difference.
        reduce_s: of a sum of gradients: constant, and per byte; shape [2, tallies or 1, ways].
    """

    following: Integers
    row: Integers
    replicas: Integers
    slowness: Floats
    limit_bytes: Floats
    group: Integers
    late_s: Floats
    s_per_byte: Floats
    reduce_s: Floats


class Goal(NamedTuple):
    """What a chain of stages shall be.

    Args:
        objective: LOAD, LATENCY or MEMORY.
        cap_s: no stage has a larger load.
        link_cap_s: no message takes longer.
        messages: FREE, ADDED or OVERLAPPED.
        flying: micro-batches in flight by number of stages after; empty if memory does not matter.
        temporary_bytes: what one operator allocates at once.
        buffers: how often messages count as memory besides.
        modes: 1 to keep, 2 if stages may recompute.
        entering: how much of what crosses its start a stage is taken to hold.
        micro_batches: over which a sum of gradients is spread.
        bound: values from here on are of no interest.
        limit_bytes: of the largest device, for MEMORY, which counts what is above a rank's limit.
    """

    objective: int
    cap_s: float = inf
    link_cap_s: float = inf
    messages: int = FREE
    flying: Floats = np.zeros(0)
    temporary_bytes: float = 0.0
    buffers: float = 0.0
    modes: int = 1
    entering: float = 1.0
    micro_batches: float = 1.0
    bound: float = inf
    limit_bytes: float = inf


class Best(NamedTuple):
    """The best chain from every downset to the end, by tally and group of its first stage.

    Args:
        value: infinite where there is none.
        end, rest, after: downset, tally and group that the first stage is followed by.
        option: way times modes plus mode of the first stage.
        depth: stages.
        reached: range of the tallies that chains from every downset have; shape [downsets, 2].
    """

    value: Floats
    end: npt.NDArray[np.int32]
    rest: npt.NDArray[np.int32]
    after: npt.NDArray[np.int16]
    option: npt.NDArray[np.int16]
    depth: npt.NDArray[np.int32]
    reached: Integers


@dataclass(frozen=True)
class Chain:
    """Places of downsets from the empty to the full one; way and mode of the stages between."""

    cuts: tuple[int, ...]
    ways: tuple[int, ...]
    modes: tuple[int, ...]


@dataclass(frozen=True)
class Chains:
    """What the programme found."""

    best: Best
    modes: int
    order: Integers

    def value(self, tallies: Integers | None = None) -> float:
        """Of the best chain of all blocks, with some tallies; infinite if there is none."""
        value = self.best.value[0]
        return float((value if tallies is None else value[tallies]).min(initial=inf))

    def chain(self, tallies: Integers | None = None) -> Chain:
        """That chain; there must be one."""
        value = self.best.value[0]
        chosen = np.arange(len(value)) if tallies is None else tallies
        place, group = np.unravel_index(int(value[chosen].argmin()), value[chosen].shape)
        state = 0, int(chosen[place]), int(group)
        cuts, ways, modes = [0], [], []
        while int(self.best.depth[state]):
            way, mode = divmod(int(self.best.option[state]), self.modes)
            ways.append(way)
            modes.append(mode)
            rest, after = int(self.best.rest[state]), int(self.best.after[state])
            state = int(self.best.end[state]), rest, after
            cuts.append(int(self.order[state[0]]))
        return Chain(tuple(cuts), tuple(ways), tuple(modes))


def best_chains(
    space: CutSpace,
    costs: CostTable,
    devices: Devices,
    goal: Goal,
    check: Check = lambda: None,
) -> Chains:
    """The best chain of stages for every tally.

    Args:
        check: called now and then.
    """
    order, words = _by_work(space, costs)
    table = costs.reordered(order)
    states, groups = len(space), int(devices.group.max()) + 1
    shape = states, len(devices.following), groups
    best = Best(
        np.full(shape, inf),
        np.zeros(shape, dtype=np.int32),
        np.zeros(shape, dtype=np.int32),
        np.zeros(shape, dtype=np.int16),
        np.zeros(shape, dtype=np.int16),
        np.zeros(shape, dtype=np.int32),
        np.tile(np.array([len(devices.following), 0]), (states, 1)),
    )
    best.value[-1, 0, 0] = -inf if goal.objective == MEMORY else 0.0
    best.reached[-1] = 0, 1
    steps = states * devices.following.size * groups * goal.modes
    chunk = max(1, STEPS // max(1, steps))
    for stop in range(states - 1, 0, -chunk):
        check()
        _extend(words, table, devices, goal, best, max(0, stop - chunk), stop)
    return Chains(best, goal.modes, order)


def _by_work(space: CutSpace, costs: CostTable) -> tuple[Integers, Words]:
    """The downsets by rising work, smaller ones first; chains begin at the first."""
    size = space.rows.sum(axis=1)
    order = np.lexsort((np.arange(len(space)), size, costs.work_s[0, 0]))
    return order, np.ascontiguousarray(space.words[order])


@compiled
def _extend(
    words: Words,
    costs: CostTable,
    devices: Devices,
    goal: Goal,
    best: Best,
    begin: int,
    stop: int,
) -> None:
    """Put a stage that begins at each downset from ``stop`` - 1 down to ``begin`` before chains."""
    states, width = words.shape
    ways, least_slow = len(devices.row), devices.slowness.min()
    alone = costs.work_s.shape[1] == 1
    for start in range(stop - 1, begin - 1, -1):
        most = len(devices.following) - 1
        if alone and ways == 1 and goal.cap_s > 0.0:  # what is before needs stages, too
            before_s = (costs.work_s[0, 0, start] - costs.work_s[0, 0, 0]) * least_slow
            most -= min(most, int(np.ceil(before_s / goal.cap_s - 1e-9)))
        for end in range(start + 1, states):
            work_s = costs.work_s[0, 0, end] - costs.work_s[0, 0, start]
            if alone and work_s * least_slow > goal.cap_s:
                break
            if best.reached[end, 0] >= min(best.reached[end, 1], most):
                continue
            inside = True
            for word in range(width):
                if words[start, word] & ~words[end, word]:
                    inside = False
                    break
            if inside:
                for way in range(ways):
                    _extend_by_stage(costs, devices, goal, best, start, end, way)


class _Stage(NamedTuple):
    """What a stage between two downsets costs in one way, on the profile's device."""

    work_s: float
    again_s: float
    reduced_bytes: float
    resident_bytes: float
    touched_bytes: float
    kept_bytes: float
    buffer_bytes: float
    there_bytes: float
    back_bytes: float
    crossing_bytes: float


@part_of_kernel
def _stage(costs: CostTable, goal: Goal, start: int, end: int, row: int) -> _Stage:
    touched = costs.saved_bytes[end] - costs.saved_bytes[start]
    entering, returning = costs.activation_bytes[start], costs.gradient_bytes[start]
    there, back = costs.activation_bytes[end], costs.gradient_bytes[end]
    share = 1.0
    if costs.cache_bytes > 0.0:
        parameters = costs.parameter_bytes[end] - costs.parameter_bytes[start]
        size = 2.0 * parameters + touched + goal.entering * entering
        share = min(1.0, max(0.0, 2.0 * (size / costs.cache_bytes - 1.0)))
    fast = costs.work_s[0, row, end] - costs.work_s[0, row, start]
    slow = costs.work_s[1, row, end] - costs.work_s[1, row, start]
    return _Stage(
        fast + (slow - fast) * share + costs.stage_s,
        costs.forward_s[end] - costs.forward_s[start],
        costs.reduced_bytes[end] - costs.reduced_bytes[start],
        costs.resident_bytes[row, end] - costs.resident_bytes[row, start],
        touched,
        goal.entering * entering,
        goal.buffers * (entering + there),
        there,
        back,
        entering + returning + there + back,
    )


@part_of_kernel
def _excess_bytes(
    stage: _Stage, goal: Goal, depth: int, replicas: int, mode: int, limit_bytes: float
) -> float:
    """Memory above the limit of a replica of a stage with so many stages after it."""
    if len(goal.flying) == 0:
        return -np.inf
    flying = goal.flying[min(depth, len(goal.flying) - 1)]
    taken = stage.resident_bytes + goal.temporary_bytes - limit_bytes
    if mode == RECOMPUTE:
        return float(taken + flying * stage.kept_bytes + stage.touched_bytes + stage.buffer_bytes)
    held = stage.touched_bytes + stage.kept_bytes + stage.buffer_bytes
    return float(taken + flying * held / replicas)


@part_of_kernel
def _sum_s(stage: _Stage, devices: Devices, tally: int, way: int) -> float:
    """Of the sum of gradients."""
    if devices.replicas[way] == 1 or stage.reduced_bytes <= 0.0:
        return 0.0
    place = min(tally, devices.reduce_s.shape[1] - 1)
    per_byte = devices.reduce_s[1, place, way]
    return float(devices.reduce_s[0, place, way] + stage.reduced_bytes * per_byte)


@part_of_kernel
def _joined(
    stage: _Stage,
    goal: Goal,
    value: float,
    load_s: float,
    excess: float,
    rate: float,
    late_s: float,
) -> float:
    """The value of a chain with one stage more before it."""
    if goal.objective == LATENCY:
        return float(value + load_s + (stage.there_bytes + stage.back_bytes) * rate + 2.0 * late_s)
    if goal.objective == MEMORY:
        return max(value, excess)
    if goal.messages == ADDED:
        load_s += stage.crossing_bytes * rate
    elif goal.messages == OVERLAPPED:
        load_s = max(load_s, 0.5 * stage.crossing_bytes * rate)
    return max(value, load_s)


@part_of_kernel
def _extend_by_stage(
    costs: CostTable,
    devices: Devices,
    goal: Goal,
    best: Best,
    start: int,
    end: int,
    way: int,
) -> None:
    """Put one stage before the chains that begin at its end."""
    stage = _stage(costs, goal, start, end, devices.row[way])
    least = stage.resident_bytes + goal.temporary_bytes - goal.limit_bytes
    if goal.objective == MEMORY and least >= goal.bound:
        return
    near = min(way, devices.late_s.shape[1] - 1)
    for tally in range(best.reached[end, 0], best.reached[end, 1]):
        if devices.following[tally, way] < 0:
            continue
        at = min(tally, len(devices.slowness) - 1)
        far = min(tally, len(devices.late_s) - 1)
        sum_s = _sum_s(stage, devices, tally, way) / goal.micro_batches
        for group in range(best.value.shape[2]):
            to = min(group, devices.late_s.shape[2] - 1)
            rate, late_s = devices.s_per_byte[far, near, to], devices.late_s[far, near, to]
            longest_s = max(stage.there_bytes, stage.back_bytes) * rate
            if best.value[end, tally, group] == np.inf or longest_s > goal.link_cap_s:
                continue
            for mode in range(goal.modes):
                work_s = stage.work_s + stage.again_s * mode / devices.replicas[way]
                load_s = work_s * devices.slowness[at, way]
                if load_s > goal.cap_s or (sum_s > 0.0 and load_s + sum_s > SUMMED * goal.cap_s):
                    continue
                depth, replicas = best.depth[end, tally, group], devices.replicas[way]
                limit = devices.limit_bytes[at, way]
                excess = _excess_bytes(stage, goal, depth, replicas, mode, limit)
                if goal.objective != MEMORY and excess > 0.0:
                    continue
                value = best.value[end, tally, group]
                value = _joined(stage, goal, value, load_s + sum_s, excess, rate, late_s)
                if value < goal.bound:
                    option = way * goal.modes + mode
                    _enter(best, devices, start, end, tally, group, option, way, value)


@part_of_kernel
def _enter(
    best: Best,
    devices: Devices,
    start: int,
    end: int,
    tally: int,
    group: int,
    option: int,
    way: int,
    value: float,
) -> None:
    """Enter a chain if it is better."""
    new, mine = devices.following[tally, way], devices.group[way]
    if value >= best.value[start, new, mine]:
        return
    best.value[start, new, mine] = value
    best.end[start, new, mine] = end
    best.rest[start, new, mine] = tally
    best.after[start, new, mine] = group
    best.option[start, new, mine] = option
    best.depth[start, new, mine] = best.depth[end, tally, group] + 1
    best.reached[start, 0] = min(best.reached[start, 0], new)
    best.reached[start, 1] = max(best.reached[start, 1], new + 1)
