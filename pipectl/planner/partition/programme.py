"""The dynamic programme: the best chain of stages over all downsets of a space, from the end.

    best[start, tally after and of it] = best over (end, option) of
        the stage from start to end, joined with best[end, tally after it]

An option is a kind of device, a number of replicas and a mode. Built from the end of the pipeline,
where the micro-batches in flight are known. A chain is judged by its largest load, by one
micro-batch's way through all stages and back while no load is above a cap, by the largest memory,
or by the devices it takes while no load is above a cap. Over all downsets it is exact (Tarnawski et
al., "Efficient algorithms for device placement of DNN graph operators", NeurIPS 2020, solve the
first objective this way); over a sample of them it is the best among the chains of the sample. Ties
go to the chain that was met first, so the result is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl.arrays import Floats, Integers, Words
from pipectl.compiled import compiled, part_of_kernel
from pipectl.planner.costs.table import CostTable
from pipectl.planner.partition.cut_space import CutSpace

LOAD, LATENCY, MEMORY, DEVICES = range(4)
"""What a chain is judged by."""
FREE, ADDED, OVERLAPPED = range(3)
"""How messages count as load: not at all, on top of the compute, or if they take longer."""
KEEP, RECOMPUTE, ELSEWHERE, RECOMPUTE_ELSEWHERE = range(4)
"""What a stage does with what its backward needs; the last two have a second device for it."""
STEPS = 10**8
"""Of the inner loop between two looks at the time."""

Check = Callable[[], None]
"""Called now and then; raises to end the search."""


class Options(NamedTuple):
    """What a stage may take and do. A *tally* says what is taken, from the end of the pipeline.

    Args:
        following: the tally after a stage with each option, -1 if there is none; shape
            [tallies, options].
        kind: of device.
        mode: KEEP or another.
        row: of the table's times.
        devices: that it takes.
        replicas: that share the micro-batch.
        slowness: relative to the profile's device.
        limit_bytes: memory of a device.
        state_share: part of the optimizer's state that a device holds.
        latency_s, s_per_byte: of messages between stages, by bytes of a whole micro-batch.
        sum_s_per_byte: of the sum of gradients over the replicas, spread over the micro-batches.
        copy_s_per_byte: between the two devices of a stage.
    """

    following: Integers
    kind: Integers
    mode: Integers
    row: Integers
    devices: Floats
    replicas: Floats
    slowness: Floats
    limit_bytes: Floats
    state_share: Floats
    latency_s: Floats
    s_per_byte: Floats
    sum_s_per_byte: Floats
    copy_s_per_byte: float

    def __len__(self) -> int:
        return len(self.kind)

    @classmethod
    def of(cls, following: Integers, copy_s_per_byte: float = 0.0, **given: Any) -> Options:
        """Options by what sets them apart; otherwise each keeps what it saves, on one device as
        fast as the profile's with enough memory, and messages take no time.

        Args:
            given: fields, one number for all options or one for each.
        """
        count = following.shape[1]
        whole = ("kind", "mode", "row")
        one = ("devices", "replicas", "slowness", "state_share")
        columns = dict.fromkeys(whole, 0) | dict.fromkeys(one, 1.0) | {"limit_bytes": inf}
        columns |= dict.fromkeys(("latency_s", "s_per_byte", "sum_s_per_byte"), 0.0) | given
        arrays: dict[str, Any] = {
            name: np.array(
                np.broadcast_to(value, count), dtype=np.int64 if name in whole else np.float64
            )
            for name, value in columns.items()
        }
        return cls(
            following=np.ascontiguousarray(following), copy_s_per_byte=copy_s_per_byte, **arrays
        )


class Goal(NamedTuple):
    """What a chain of stages shall be.

    Args:
        objective: LOAD, LATENCY, MEMORY or DEVICES.
        cap_s: no stage has a larger load.
        messages: FREE, ADDED or OVERLAPPED.
        flying: micro-batches in flight by number of stages after; empty if memory does not matter.
        temporary_bytes: what one operator allocates at once.
        buffers: how often messages count as memory besides.
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
    entering: float = 1.0
    bound: float = inf
    limit_bytes: float = inf


class Best(NamedTuple):
    """The best chain from every downset to the end, by tally; shape [downsets, tallies].

    Args:
        value: infinite where there is none.
        end, rest: downset and tally that the first stage is followed by.
        option: of the first stage.
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
    """Places of downsets from the empty to the full one; options of the stages between."""

    cuts: tuple[int, ...]
    options: tuple[int, ...]

    @property
    def arrays(self) -> tuple[Integers, Integers]:
        """The same for kernels."""
        return np.array(self.cuts, dtype=np.int64), np.array(self.options, dtype=np.int64)


@dataclass(frozen=True)
class Chains:
    """What the programme found."""

    best: Best
    order: Integers

    def value(self, tallies: Integers) -> float:
        """Of the best chain of all blocks, with some tallies; infinite if there is none."""
        return float(self.best.value[0, tallies].min(initial=inf))

    def chain(self, tallies: Integers) -> Chain:
        """That chain; there must be one."""
        state = 0, int(tallies[self.best.value[0, tallies].argmin()])
        cuts, options = [0], []
        while int(self.best.depth[state]):
            options.append(int(self.best.option[state]))
            state = int(self.best.end[state]), int(self.best.rest[state])
            cuts.append(int(self.order[state[0]]))
        return Chain(tuple(cuts), tuple(options))


def best_chains(
    space: CutSpace,
    costs: CostTable,
    options: Options,
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
    shape = states, len(options.following)
    best = Best(
        np.full(shape, inf),
        np.zeros(shape, dtype=np.int32),
        np.zeros(shape, dtype=np.int32),
        np.zeros(shape, dtype=np.int16),
        np.zeros(shape, dtype=np.int32),
        np.tile(np.array([len(options.following), 0]), (states, 1)),
    )
    best.value[-1, 0] = -inf if goal.objective == MEMORY else 0.0
    best.reached[-1] = 0, 1
    chunk = max(1, STEPS // max(1, states * options.following.size))
    for stop in range(states - 1, 0, -chunk):
        check()
        _extend(words, table, options, goal, best, max(0, stop - chunk), stop)
    return Chains(best, order)


@compiled
def fits(costs: CostTable, options: Options, goal: Goal, cuts: Integers, chosen: Integers) -> bool:
    """Whether the stages of a chain stay within memory.

    Args:
        cuts: places of the downsets of the table.
        chosen: options of the stages between.
    """
    for place in range(len(chosen)):
        stage = _stage(costs, goal, cuts[place], cuts[place + 1])
        depth = len(chosen) - 1 - place
        if _excess_bytes(stage, options, goal, depth, chosen[place]) > 0.0:
            return False
    return True


def _by_work(space: CutSpace, costs: CostTable) -> tuple[Integers, Words]:
    """The downsets by rising work, smaller ones first; chains begin at the first."""
    size = space.rows.sum(axis=1)
    order = np.lexsort((np.arange(len(space)), size, costs.work_s[0, 0]))
    return order, np.ascontiguousarray(space.words[order])


@compiled
def _extend(
    words: Words,
    costs: CostTable,
    options: Options,
    goal: Goal,
    best: Best,
    begin: int,
    stop: int,
) -> None:
    """Put a stage that begins at each downset from ``stop`` - 1 down to ``begin`` before chains."""
    states, width = words.shape
    work_s = costs.work_s[0, 0]
    least_slow = (options.slowness / options.devices).min()
    plain = options.kind.max() == 0 and options.devices.max() == 1.0
    for start in range(stop - 1, begin - 1, -1):
        most = len(options.following) - 1
        if plain and goal.cap_s > 0.0:  # what is before needs stages, too
            before_s = (work_s[start] - work_s[0]) * least_slow
            most -= min(most, int(np.ceil(before_s / goal.cap_s - 1e-9)))
        for end in range(start + 1, states):
            if (work_s[end] - work_s[start]) * least_slow > goal.cap_s:
                break
            if best.reached[end, 0] >= min(best.reached[end, 1], most):
                continue
            inside = True
            for word in range(width):
                if words[start, word] & ~words[end, word]:
                    inside = False
                    break
            if inside:
                _extend_by_stage(costs, options, goal, best, start, end)


class _Stage(NamedTuple):
    """What a stage between two downsets holds and sends."""

    uncached: float
    fixed_bytes: float
    state_bytes: float
    summed_bytes: float
    touched_bytes: float
    kept_bytes: float
    buffer_bytes: float
    there_bytes: float
    back_bytes: float
    crossing_bytes: float
    entering_bytes: float


@part_of_kernel
def _stage(costs: CostTable, goal: Goal, start: int, end: int) -> _Stage:
    touched = costs.saved_bytes[end] - costs.saved_bytes[start]
    entering, returning = costs.activation_bytes[start], costs.gradient_bytes[start]
    there, back = costs.activation_bytes[end], costs.gradient_bytes[end]
    parameters = costs.parameter_bytes[end] - costs.parameter_bytes[start]
    summed = costs.summed_bytes[end] - costs.summed_bytes[start]
    share = 1.0
    if costs.cache_bytes > 0.0:
        size = 2.0 * parameters + touched + goal.entering * entering
        share = min(1.0, max(0.0, 2.0 * (size / costs.cache_bytes - 1.0)))
    return _Stage(
        share,
        parameters + summed,
        costs.state_bytes[end] - costs.state_bytes[start],
        summed,
        touched,
        goal.entering * entering,
        goal.buffers * (entering + there),
        there,
        back,
        entering + returning + there + back,
        entering,
    )


@part_of_kernel
def _load_s(
    stage: _Stage, costs: CostTable, options: Options, start: int, end: int, option: int
) -> float:
    """What the busiest device of a stage computes, or copies, for one micro-batch."""
    row, mode, slowness = options.row[option], options.mode[option], options.slowness[option]
    fast = costs.work_s[row, 0, end] - costs.work_s[row, 0, start]
    slow = costs.work_s[row, 1, end] - costs.work_s[row, 1, start]
    work_s = fast + (slow - fast) * stage.uncached + costs.stage_s
    again_s = costs.forward_s[row, end] - costs.forward_s[row, start]
    if mode == KEEP:
        return float(work_s * slowness + stage.summed_bytes * options.sum_s_per_byte[option])
    if mode == RECOMPUTE:
        return float((work_s + again_s) * slowness)
    if mode == ELSEWHERE:
        forward_s = again_s + costs.stage_forward_s
        longer_s = max(forward_s, work_s - forward_s) * slowness
        return float(max(longer_s, stage.touched_bytes * options.copy_s_per_byte))
    return float(max(work_s * slowness, stage.entering_bytes * options.copy_s_per_byte))


@part_of_kernel
def _excess_bytes(stage: _Stage, options: Options, goal: Goal, depth: int, option: int) -> float:
    """Memory above the limit of a stage with so many stages after it."""
    if len(goal.flying) == 0:
        return -np.inf
    flying = goal.flying[min(depth, len(goal.flying) - 1)]
    taken = stage.fixed_bytes + stage.state_bytes * options.state_share[option]
    taken += goal.temporary_bytes - options.limit_bytes[option]
    if options.mode[option] == RECOMPUTE:
        return float(taken + flying * stage.kept_bytes + stage.touched_bytes + stage.buffer_bytes)
    held = stage.touched_bytes + stage.kept_bytes + stage.buffer_bytes
    replicas = options.replicas[option]
    if replicas > 1.0:
        summing = stage.summed_bytes * (2.0 - 1.0 / replicas)
        return float(taken + max(flying * held / replicas, summing))
    return float(taken + flying * held)


@part_of_kernel
def _joined(
    stage: _Stage,
    options: Options,
    goal: Goal,
    option: int,
    value: float,
    load_s: float,
    excess: float,
) -> float:
    """The value of a chain with one stage more before it."""
    rate = options.s_per_byte[option]
    if goal.objective == LATENCY:
        sent_s = (stage.there_bytes + stage.back_bytes) * rate
        return float(value + load_s + sent_s + 2.0 * options.latency_s[option])
    if goal.objective == MEMORY:
        return max(value, excess)
    if goal.objective == DEVICES:
        return float(value + options.devices[option])
    if goal.messages == ADDED:
        load_s += stage.crossing_bytes * rate
    elif goal.messages == OVERLAPPED:
        load_s = max(load_s, 0.5 * stage.crossing_bytes * rate)
    return max(value, load_s)


@part_of_kernel
def _extend_by_stage(
    costs: CostTable, options: Options, goal: Goal, best: Best, start: int, end: int
) -> None:
    """Put one stage, with every option, before the chains that begin at its end."""
    stage = _stage(costs, goal, start, end)
    for option in range(len(options.kind)):
        feasible = _extend_by_option(stage, costs, options, goal, best, start, end, option)
        if feasible and goal.objective == DEVICES and len(goal.flying) == 0:
            break  # options rise by the devices they take


@part_of_kernel
def _extend_by_option(
    stage: _Stage,
    costs: CostTable,
    options: Options,
    goal: Goal,
    best: Best,
    start: int,
    end: int,
    option: int,
) -> bool:
    """Put a stage before the chains that begin at its end; False if it loads too much."""
    least = stage.fixed_bytes + stage.state_bytes + goal.temporary_bytes - goal.limit_bytes
    if goal.objective == MEMORY and least >= goal.bound:
        return False
    load_s = _load_s(stage, costs, options, start, end, option)
    if load_s > goal.cap_s:
        return False
    if goal.objective == DEVICES and goal.messages == OVERLAPPED:
        crossing_s = max(stage.there_bytes, stage.back_bytes) * options.s_per_byte[option]
        if crossing_s > goal.cap_s:
            return False
    for tally in range(best.reached[end, 0], best.reached[end, 1]):
        new = options.following[tally, option]
        if new < 0 or best.value[end, tally] == np.inf:
            continue
        depth = best.depth[end, tally]
        excess = _excess_bytes(stage, options, goal, depth, option)
        if goal.objective != MEMORY and excess > 0.0:
            continue
        value = _joined(stage, options, goal, option, best.value[end, tally], load_s, excess)
        if value < goal.bound and value < best.value[start, new]:
            best.value[start, new] = value
            best.end[start, new] = end
            best.rest[start, new] = tally
            best.option[start, new] = option
            best.depth[start, new] = depth + 1
            best.reached[start, 0] = min(best.reached[start, 0], new)
            best.reached[start, 1] = max(best.reached[start, 1], new + 1)
    return True
