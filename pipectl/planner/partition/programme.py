"""The dynamic programme: the best chain of stages over all downsets of a space, from the end.

    best[start, tally after and of it] = best over (end, option) of
        the stage from start to end, joined with best[end, tally after it]

An option is a kind of device, a number of replicas and a mode. Chains are built from the end of the
pipeline, where the number of micro-batches in flight is known. The objective is the largest load,
the latency of one micro-batch through all stages and back with loads up to a cap, or the largest
memory. Over all downsets the result is optimal
(Tarnawski et al., "Efficient algorithms for device placement of DNN graph operators", NeurIPS 2020,
solve the first objective this way); over a sample, it is the best chain of the sample. In ties the
first chain is kept, so the result is the same on every machine.

Stages cost what the sums of :mod:`pipectl.planner.partition.tables` at their two ends differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Any, NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers, Records, Words, record
from pipectl.compiled import compiled
from pipectl.planner.graph.downsets import CutSpace
from pipectl.planner.partition.estimate import ROUNDING_BYTES
from pipectl.planner.partition.tables import CostTable

LOAD, LATENCY, MEMORY = range(3)
"""Objectives of a chain."""
FREE, ADDED, OVERLAPPED = range(3)
"""How messages count as load: not at all, added to compute, or as the maximum of both."""
KEEP, RECOMPUTE, KEEP_APART, RECOMPUTE_APART = range(4)
"""What a stage does with saved values; the last two run the backward on a second device."""
STEPS = 10**9
"""Steps of the inner loop between two checks of the time."""

MAX_KEPT, MAX_KEPT_BYTES = 128, 2**20
"""Maximum number of cached results, for searches with other limits, and of bytes of each."""

Check = Callable[[], None]
"""Called repeatedly; raises to end the search."""


OPTION = record(
    "kind mode row",
    "devices replicas slowness limit_bytes state_share latency_s s_per_byte sum_s_per_byte"
    " copy_s_per_byte",
)
"""Options of a stage:

- ``kind`` of device, ``mode`` (KEEP or another), and ``row`` of the table's times;
- ``devices`` it takes, and ``replicas`` that share the micro-batch;
- ``slowness`` relative to the profile's device, and memory of a device;
- ``state_share``: part of the optimizer's state per device;
- seconds of messages between stages, per byte of a whole micro-batch; of the sum of gradients over
  the replicas, spread over the micro-batches; and between the two devices of a stage.
"""
_BEST = np.dtype(
    (
        np.record,
        [("value", "f8"), ("end", "i4"), ("rest", "i4"), ("option", "i4"), ("depth", "i4")],
    )
)
"""The best chain from a downset to the end: its value, infinite if there is none; the downset and
tally after its first stage; the option of this stage; and the number of stages."""


_known_chains: dict[bytes, Records] = {}


class Options(NamedTuple):
    """Options of stages. A *tally* is what a chain takes, counted from the end of the pipeline.

    Args:
        following: the tally after a stage with each option, -1 if there is none; shape
            [tallies, options].
        each: fields of every option.
    """

    following: Integers
    each: Records

    @classmethod
    def of(cls, following: Integers, **given: Any) -> Options:
        """Options with defaults: keep saved values, one device as fast as the profile's, enough
        memory, and messages that take no time.

        Args:
            given: fields, one number for all options or one for each.
        """
        each = np.zeros(following.shape[1], dtype=OPTION)
        one = dict.fromkeys(("devices", "replicas", "slowness", "state_share"), 1.0)
        for name, value in (one | {"limit_bytes": inf} | given).items():
            each[name] = value
        return cls(np.ascontiguousarray(following), each)

    @property
    def replicas(self) -> Floats:
        """Replicas of every option."""
        return np.asarray(self.each["replicas"])


class Goal(NamedTuple):
    """Objective and limits of chains.

    Args:
        objective: LOAD, LATENCY or MEMORY.
        cap_s: largest load of a stage.
        messages: FREE, ADDED or OVERLAPPED.
        in_flight: micro-batches, by number of later stages; empty if memory has no limit.
        reserved_bytes: memory left to other stages of the device, by number of later stages.
        temporary_bytes: allocated by one operator at once.
        buffers: additional copies of messages that count as memory.
        entering: share of the values that cross its start that a stage is taken to hold.
        bound: chains with this value or more are ignored.
    """

    objective: int
    cap_s: float = inf
    messages: int = FREE
    in_flight: Floats = np.zeros(0)
    reserved_bytes: Floats = np.zeros(1)
    temporary_bytes: float = 0.0
    buffers: float = 0.0
    entering: float = 1.0
    bound: float = inf


@dataclass(frozen=True)
class Chain:
    """Indices of downsets from the empty to the full one; options of the stages between."""

    cuts: tuple[int, ...]
    options: tuple[int, ...]


@dataclass(frozen=True)
class Chains:
    """Result of the dynamic programme.

    Args:
        best: by downset and tally.
        order: indices of the downsets in the space.
    """

    best: Records
    order: Integers

    def values(self, tallies: Integers) -> Floats:
        """Values of the best chains of all blocks with these tallies; infinite if there is none."""
        return np.asarray(self.best["value"][0, tallies])

    def value(self, tallies: Integers) -> float:
        """The smallest of :meth:`values`."""
        return float(self.values(tallies).min(initial=inf))

    def chain(self, tallies: Integers) -> Chain:
        """The best chain; there must be one."""
        best, state = self.best, (0, int(tallies[self.values(tallies).argmin()]))
        cuts, options = [0], []
        while best["depth"][state]:
            options.append(int(best["option"][state]))
            state = int(best["end"][state]), int(best["rest"][state])
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
        check: called repeatedly; raises to end the search.
    """
    order, words = _by_work(space, costs)
    table = costs.reordered(order)
    key = _hash_of((words, table, options, goal))
    if key in _known_chains:
        return Chains(_known_chains[key], order)
    states = len(space)
    best = np.zeros((states, len(options.following)), dtype=_BEST)
    best["value"] = inf
    best["value"][-1, 0] = -inf if goal.objective == MEMORY else 0.0
    # The range of the tallies of chains from every downset.
    reached = np.tile(np.array([len(options.following), 0]), (states, 1))
    reached[-1] = 0, 1
    each = options.each
    least_slow = float((each["slowness"] / each["devices"]).min())
    plain = bool(each["kind"].max() == 0 and each["devices"].max() == 1.0)
    least_bytes, most_bytes = _least_bytes(table, options, goal)
    chunk = max(1, STEPS // max(1, states * options.following.size))
    for stop in range(states - 1, 0, -chunk):
        check()
        begin = max(0, stop - chunk)
        _extend(
            *(words, table, options, goal, best, reached, begin, stop, least_slow, plain),
            *(least_bytes, most_bytes),
        )
    if best.nbytes <= MAX_KEPT_BYTES:
        if len(_known_chains) == MAX_KEPT:
            del _known_chains[next(iter(_known_chains))]
        _known_chains[key] = best
    return Chains(best, order)


def _least_bytes(costs: CostTable, options: Options, goal: Goal) -> tuple[Floats, float]:
    """What every stage holds at least, however it is run, and what it may hold at most.

    Returns:
        Bytes per downset, shape [2, downsets]: up to the downset, and the least up to it or a later
        one. A stage holds no less than the second at its end minus the first at its start.
    """
    sums, each = costs.sums, options.each
    if len(goal.in_flight) == 0:
        return np.zeros((2, len(sums))), inf
    bytes_ = sums["parameter_bytes"] + sums["summed_bytes"]
    bytes_ += sums["state_bytes"] * each["state_share"].min()
    bytes_ += sums["saved_bytes"] / each["replicas"].max()
    later = np.minimum.accumulate(bytes_[::-1])[::-1]
    most = each["limit_bytes"].max() - goal.temporary_bytes - goal.reserved_bytes.min()
    most += goal.bound if goal.objective == MEMORY else 0.0
    return np.stack([bytes_, later]), float(most) + ROUNDING_BYTES


def _hash_of(values: Iterable[Any]) -> bytes:
    """Hash of the contents of numbers, arrays, and tuples of these."""
    content = blake2b(digest_size=16)
    for value in values:
        if isinstance(value, np.ndarray):
            content.update(f"{value.shape};".encode())
            content.update(value.tobytes())
        elif isinstance(value, tuple):
            content.update(_hash_of(value))
        else:
            content.update(f"{value!r};".encode())
    return content.digest()


def _by_work(space: CutSpace, costs: CostTable) -> tuple[Integers, Words]:
    """The downsets by ascending work, subsets first; chains begin at the first and end at the last.

    Sums of the same work may differ by rounding, so the first and the last are chosen by size.
    """
    size = space.rows.sum(axis=1)
    work_s = costs.work_s[0, 0].copy()
    work_s[size.argmin()], work_s[size.argmax()] = -inf, inf
    order = np.lexsort((np.arange(len(space)), size, work_s))
    return order, np.ascontiguousarray(space.words[order])


@compiled
def _extend(
    words: Words,
    costs: CostTable,
    options: Options,
    goal: Goal,
    best: Records,
    reached: Integers,
    begin: int,
    stop: int,
    least_slow: float,
    plain: bool,
    least_bytes: Floats,
    most_bytes: float,
) -> None:
    """Prepend a stage that begins at each downset from ``stop`` - 1 down to ``begin`` to chains.

    Args:
        least_slow: lower bound on the seconds that an option takes per second of work.
        plain: whether every stage takes one device of the only kind.
        least_bytes, most_bytes: from :func:`_least_bytes`.
    """
    states, width = words.shape
    work_s = costs.work_s[0, 0]
    for start in range(stop - 1, begin - 1, -1):
        most = len(options.following) - 1
        if plain and goal.cap_s > 0.0:  # the blocks before need stages too
            before_s = (work_s[start] - work_s[0]) * least_slow
            most -= min(most, int(np.ceil(before_s / goal.cap_s - 1e-9)))
        for end in range(start + 1, states):
            if (work_s[end] - work_s[start]) * least_slow > goal.cap_s:
                break
            if least_bytes[1, end] - least_bytes[0, start] > most_bytes:
                break
            if reached[end, 0] >= min(reached[end, 1], most):
                continue
            inside = True
            for word in range(width):
                if words[start, word] & ~words[end, word]:
                    inside = False
                    break
            if inside:
                _extend_by_stage(costs, options, goal, best, reached, start, end)


class _Stage(NamedTuple):
    """Memory and messages of a stage between two downsets.

    Args:
        uncached: weight of uncached times; 0 is cached.
        fixed_bytes: parameters and their gradients.
    """

    uncached: float
    fixed_bytes: float
    state_bytes: float
    summed_bytes: float
    touched_bytes: float
    there_bytes: float
    back_bytes: float
    entering_bytes: float
    returning_bytes: float


@compiled
def _stage(start: Any, end: Any, goal: Goal, cache_bytes: float) -> _Stage:
    touched = end.saved_bytes - start.saved_bytes
    parameters = end.parameter_bytes - start.parameter_bytes
    summed = end.summed_bytes - start.summed_bytes
    share = 1.0
    if cache_bytes > 0.0:
        size = parameters + end.trained_bytes - start.trained_bytes
        size += touched + goal.entering * start.activation_bytes
        share = min(1.0, max(0.0, 2.0 * (size / cache_bytes - 1.0)))
    return _Stage(
        share,
        parameters + summed,
        end.state_bytes - start.state_bytes,
        summed,
        touched,
        end.activation_bytes,
        end.gradient_bytes,
        start.activation_bytes,
        start.gradient_bytes,
    )


@compiled
def _load_s(stage: _Stage, costs: CostTable, option: Any, start: int, end: int) -> float:
    """Seconds that the busiest device of a stage computes or copies per micro-batch."""
    row, mode, slowness = option.row, option.mode, option.slowness
    fast = costs.work_s[row, 0, end] - costs.work_s[row, 0, start]
    slow = costs.work_s[row, 1, end] - costs.work_s[row, 1, start]
    work_s = fast + (slow - fast) * stage.uncached + costs.stage_s
    again_s = costs.forward_s[row, end] - costs.forward_s[row, start]
    if mode == KEEP:
        return float(work_s * slowness + stage.summed_bytes * option.sum_s_per_byte)
    if mode == RECOMPUTE:
        return float((work_s + again_s) * slowness + stage.summed_bytes * option.sum_s_per_byte)
    if mode == KEEP_APART:
        forward_s = again_s + costs.stage_forward_s
        longer_s = max(forward_s, work_s - forward_s) * slowness
        return float(max(longer_s, stage.touched_bytes * option.copy_s_per_byte))
    return float(max(work_s * slowness, stage.entering_bytes * option.copy_s_per_byte))


@compiled
def _excess_bytes(stage: _Stage, option: Any, goal: Goal, depth: int) -> float:
    """Bytes above the limit of a stage with ``depth`` later stages."""
    if len(goal.in_flight) == 0:
        return -np.inf
    in_flight = goal.in_flight[min(depth, len(goal.in_flight) - 1)]
    kept = goal.entering * stage.entering_bytes
    buffers = goal.buffers * (stage.entering_bytes + stage.there_bytes)
    taken = stage.fixed_bytes + stage.state_bytes * option.state_share
    taken += goal.temporary_bytes - option.limit_bytes
    taken += goal.reserved_bytes[min(depth, len(goal.reserved_bytes) - 1)]
    if option.mode == RECOMPUTE:
        kept_bytes = in_flight * kept + stage.touched_bytes + buffers
    else:
        kept_bytes = in_flight * (stage.touched_bytes + kept + buffers)
    if option.replicas > 1.0:
        summing = stage.summed_bytes * (2.0 - 1.0 / option.replicas)
        return float(taken + max(kept_bytes / option.replicas, summing))
    return float(taken + kept_bytes)


@compiled
def _joined(
    stage: _Stage, option: Any, goal: Goal, value: float, load_s: float, excess: float
) -> float:
    """The value of a chain with one more stage before it."""
    rate = option.s_per_byte
    if goal.objective == LATENCY:
        sent_s = (stage.there_bytes + stage.back_bytes) * rate
        return float(value + load_s + sent_s + 2.0 * option.latency_s)
    if goal.objective == MEMORY:
        return max(value, excess)
    crossing = stage.entering_bytes + stage.returning_bytes + stage.there_bytes + stage.back_bytes
    if goal.messages == ADDED:
        load_s += crossing * rate
    elif goal.messages == OVERLAPPED:
        load_s = max(load_s, 0.5 * crossing * rate)
    return max(value, load_s)


@compiled
def _extend_by_stage(
    costs: CostTable,
    options: Options,
    goal: Goal,
    best: Records,
    reached: Integers,
    start: int,
    end: int,
) -> None:
    """Prepend one stage, with every option, to the chains that begin at its end."""
    stage = _stage(costs.sums[start], costs.sums[end], goal, costs.cache_bytes)
    for number in range(len(options.each)):
        option = options.each[number]
        load_s = _load_s(stage, costs, option, start, end)
        if load_s > goal.cap_s:
            continue
        for tally in range(reached[end, 0], reached[end, 1]):
            new, rest = options.following[tally, number], best[end, tally]
            if new < 0 or rest.value == np.inf:
                continue
            excess = _excess_bytes(stage, option, goal, rest.depth)
            if goal.objective != MEMORY and excess > 0.0:
                continue
            value = _joined(stage, option, goal, rest.value, load_s, excess)
            known = best[start, new]
            if value < goal.bound and value < known.value:
                known.value, known.end, known.rest = value, end, tally
                known.option, known.depth = number, rest.depth + 1
                reached[start, 0] = min(reached[start, 0], new)
                reached[start, 1] = max(reached[start, 1], new + 1)
