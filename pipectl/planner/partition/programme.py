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
from pipectl.planner.costs.table import CostTable
from pipectl.planner.partition.cut_space import CutSpace

LOAD, LATENCY, MEMORY = range(3)
"""What a chain is judged by."""
FREE, ADDED, OVERLAPPED = range(3)
"""How messages count as load: not at all, on top of the compute, or if they take longer."""
KEEP, RECOMPUTE = range(2)
"""What a stage does with what its backward needs."""
STEPS = 10**8
"""Of the inner loop between two looks at the time."""

Check = Callable[[], None]
"""Called now and then; raises to end the search."""


class Devices(NamedTuple):
    """Kinds of devices that a stage may take. A *tally* says which are taken, from the end.

    Args:
        following: the tally after a stage on each kind, -1 if there is none; shape
            [tallies, kinds].
        slowness: relative to the profile's device; shape [kinds].
        limit_bytes: memory; shape [kinds].
        latency_s, s_per_byte: of messages between stages.
    """

    following: Integers
    slowness: Floats
    limit_bytes: Floats
    latency_s: float
    s_per_byte: float


class Goal(NamedTuple):
    """What a chain of stages shall be.

    Args:
        objective: LOAD, LATENCY or MEMORY.
        cap_s: no stage has a larger load.
        messages: FREE, ADDED or OVERLAPPED.
        flying: micro-batches in flight by number of stages after; empty if memory does not matter.
        temporary_bytes: what one operator allocates at once.
        buffers: how often messages count as memory besides.
        modes: 1 to keep, 2 if stages may recompute.
        entering: how much of what crosses its start a stage is taken to hold.
        bound: values from here on are of no interest.
        limit_bytes: of the largest device, for MEMORY, which counts what is above a rank's limit.
    """

    objective: int
    cap_s: float = inf
    messages: int = FREE
    flying: Floats = np.zeros(0)
    temporary_bytes: float = 0.0
    buffers: float = 0.0
    modes: int = 1
    entering: float = 1.0
    bound: float = inf
    limit_bytes: float = inf


class Best(NamedTuple):
    """The best chain from every downset to the end, by tally; shape [downsets, tallies].

    Args:
        value: infinite where there is none.
        end, rest: downset and tally that the first stage is followed by.
        option: kind times modes plus mode of the first stage.
        depth: stages.
        reached: range of the tallies that chains from every downset have; shape [downsets, 2].
    """

    value: Floats
    end: npt.NDArray[np.int32]
    rest: npt.NDArray[np.int32]
    option: npt.NDArray[np.int16]
    depth: npt.NDArray[np.int32]
    reached: Integers


@dataclass(frozen=True)
class Chain:
    """Places of downsets from the empty to the full one; kind and mode of the stages between."""

    cuts: tuple[int, ...]
    kinds: tuple[int, ...]
    modes: tuple[int, ...]


@dataclass(frozen=True)
class Chains:
    """What the programme found."""

    best: Best
    modes: int
    order: Integers

    def value(self, tallies: Integers) -> float:
        """Of the best chain of all blocks, with some tallies; infinite if there is none."""
        return float(self.best.value[0, tallies].min(initial=inf))

    def chain(self, tallies: Integers) -> Chain:
        """That chain; there must be one."""
        state = 0, int(tallies[self.best.value[0, tallies].argmin()])
        cuts, kinds, modes = [0], [], []
        while int(self.best.depth[state]):
            kind, mode = divmod(int(self.best.option[state]), self.modes)
            kinds.append(kind)
            modes.append(mode)
            state = int(self.best.end[state]), int(self.best.rest[state])
            cuts.append(int(self.order[state[0]]))
        return Chain(tuple(cuts), tuple(kinds), tuple(modes))


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
    states = len(space)
    shape = states, len(devices.following)
    best = Best(
        np.full(shape, inf),
        np.zeros(shape, dtype=np.int32),
        np.zeros(shape, dtype=np.int32),
        np.zeros(shape, dtype=np.int16),
        np.zeros(shape, dtype=np.int32),
        np.tile(np.array([len(devices.following), 0]), (states, 1)),
    )
    best.value[-1, 0] = -inf if goal.objective == MEMORY else 0.0
    best.reached[-1] = 0, 1
    steps = states * devices.following.size * goal.modes
    chunk = max(1, STEPS // max(1, steps))
    for stop in range(states - 1, 0, -chunk):
        check()
        _extend(words, table, devices, goal, best, max(0, stop - chunk), stop)
    return Chains(best, goal.modes, order)


def _by_work(space: CutSpace, costs: CostTable) -> tuple[Integers, Words]:
    """The downsets by rising work, smaller ones first; chains begin at the first."""
    size = space.rows.sum(axis=1)
    order = np.lexsort((np.arange(len(space)), size, costs.work_s[0]))
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
    kinds, least_slow = len(devices.slowness), devices.slowness.min()
    for start in range(stop - 1, begin - 1, -1):
        most = len(devices.following) - 1
        if kinds == 1 and goal.cap_s > 0.0:  # what is before needs stages, too
            before_s = (costs.work_s[0, start] - costs.work_s[0, 0]) * least_slow
            most -= min(most, int(np.ceil(before_s / goal.cap_s - 1e-9)))
        for end in range(start + 1, states):
            work_s = costs.work_s[0, end] - costs.work_s[0, start]
            if work_s * least_slow > goal.cap_s:
                break
            if best.reached[end, 0] >= min(best.reached[end, 1], most):
                continue
            inside = True
            for word in range(width):
                if words[start, word] & ~words[end, word]:
                    inside = False
                    break
            if inside:
                stage = _stage(costs, goal, start, end)
                for kind in range(kinds):
                    _extend_by_stage(stage, devices, goal, best, start, end, kind)


class _Stage(NamedTuple):
    """What a stage between two downsets costs on the profile's device."""

    work_s: float
    again_s: float
    resident_bytes: float
    touched_bytes: float
    kept_bytes: float
    buffer_bytes: float
    there_bytes: float
    back_bytes: float
    crossing_bytes: float


@part_of_kernel
def _stage(costs: CostTable, goal: Goal, start: int, end: int) -> _Stage:
    touched = costs.saved_bytes[end] - costs.saved_bytes[start]
    entering, returning = costs.activation_bytes[start], costs.gradient_bytes[start]
    there, back = costs.activation_bytes[end], costs.gradient_bytes[end]
    share = 1.0
    if costs.cache_bytes > 0.0:
        parameters = costs.parameter_bytes[end] - costs.parameter_bytes[start]
        size = 2.0 * parameters + touched + goal.entering * entering
        share = min(1.0, max(0.0, 2.0 * (size / costs.cache_bytes - 1.0)))
    fast = costs.work_s[0, end] - costs.work_s[0, start]
    slow = costs.work_s[1, end] - costs.work_s[1, start]
    return _Stage(
        fast + (slow - fast) * share + costs.stage_s,
        costs.forward_s[end] - costs.forward_s[start],
        costs.resident_bytes[end] - costs.resident_bytes[start],
        touched,
        goal.entering * entering,
        goal.buffers * (entering + there),
        there,
        back,
        entering + returning + there + back,
    )


@part_of_kernel
def _excess_bytes(stage: _Stage, goal: Goal, depth: int, mode: int, limit_bytes: float) -> float:
    """Memory above the limit of a stage with so many stages after it."""
    if len(goal.flying) == 0:
        return -np.inf
    flying = goal.flying[min(depth, len(goal.flying) - 1)]
    taken = stage.resident_bytes + goal.temporary_bytes - limit_bytes
    if mode == RECOMPUTE:
        return float(taken + flying * stage.kept_bytes + stage.touched_bytes + stage.buffer_bytes)
    held = stage.touched_bytes + stage.kept_bytes + stage.buffer_bytes
    return float(taken + flying * held)


@part_of_kernel
def _joined(
    stage: _Stage, devices: Devices, goal: Goal, value: float, load_s: float, excess: float
) -> float:
    """The value of a chain with one stage more before it."""
    rate = devices.s_per_byte
    if goal.objective == LATENCY:
        sent_s = (stage.there_bytes + stage.back_bytes) * rate
        return float(value + load_s + sent_s + 2.0 * devices.latency_s)
    if goal.objective == MEMORY:
        return max(value, excess)
    if goal.messages == ADDED:
        load_s += stage.crossing_bytes * rate
    elif goal.messages == OVERLAPPED:
        load_s = max(load_s, 0.5 * stage.crossing_bytes * rate)
    return max(value, load_s)


@part_of_kernel
def _extend_by_stage(
    stage: _Stage, devices: Devices, goal: Goal, best: Best, start: int, end: int, kind: int
) -> None:
    """Put one stage before the chains that begin at its end."""
    least = stage.resident_bytes + goal.temporary_bytes - goal.limit_bytes
    if goal.objective == MEMORY and least >= goal.bound:
        return
    for tally in range(best.reached[end, 0], best.reached[end, 1]):
        new = devices.following[tally, kind]
        if new < 0 or best.value[end, tally] == np.inf:
            continue
        for mode in range(goal.modes):
            load_s = (stage.work_s + stage.again_s * mode) * devices.slowness[kind]
            if load_s > goal.cap_s:
                continue
            depth, limit = best.depth[end, tally], devices.limit_bytes[kind]
            excess = _excess_bytes(stage, goal, depth, mode, limit)
            if goal.objective != MEMORY and excess > 0.0:
                continue
            value = _joined(stage, devices, goal, best.value[end, tally], load_s, excess)
            if value < goal.bound and value < best.value[start, new]:
                best.value[start, new] = value
                best.end[start, new] = end
                best.rest[start, new] = tally
                best.option[start, new] = kind * goal.modes + mode
                best.depth[start, new] = depth + 1
                best.reached[start, 0] = min(best.reached[start, 0], new)
                best.reached[start, 1] = max(best.reached[start, 1], new + 1)
