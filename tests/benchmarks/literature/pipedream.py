"""PipeDream's planner: the least time per micro-batch in the steady state, with replicas.

With bandwidth B, a stage of time T and parameters W on m devices takes per micro-batch
(T + 4 (m - 1) W / (B m)) / m, and a message of a bytes to it 2 a / (B m). The dynamic programme
minimises the largest of these over prefixes of the state sequence and devices. On a hierarchy it is
solved level by level; a device of one level is a solved group of the level below. Fill and drain of
the pipeline do not count. Many plans tie; the first in ascending order of cuts and replicas is
taken. The papers on antichains solve the same without replicas, on one level.

States are augmented antichains in topological order. An antichain is a set of operators none of
which depends on another; with the earlier operators whose values are still needed it is
*augmented*, and everything above it is a prefix of the graph. From one antichain the next follow by
letting one operator step to a successor.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.1, and its optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.planner.graph.blocks import BlockGraph, bits, bitset, condense
from pipectl.planner.graph.downsets import CutSpace, prefix_downsets
from pipectl.planner.partition.layout import consecutive
from pipectl.profile import Profile
from tests.benchmarks.literature.policy import PolicyPlan, Prefixes, Work

MAX_STATES = 1500
"""If there are more antichains, the prefixes of one topological order are taken."""


def antichain_states(profile: Profile) -> CutSpace:
    """The empty state, then every state of the sequence; the last one is the whole graph."""
    graph = condense(profile)
    downsets = [0, *_sequence(graph)] if profile.edge_indices else None
    if not downsets or len(downsets) > MAX_STATES or downsets[-1] != graph.everything:
        downsets = prefix_downsets(graph, 0)
    return CutSpace(graph, tuple(downsets), False)


def _sequence(graph: BlockGraph) -> list[int]:
    """Downsets in reverse postorder of a depth-first search."""
    source = next(b for b, before in enumerate(graph.predecessors) if not before)
    start: tuple[int, ...] = (source,)
    following: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    left: list[tuple[int, ...]] = []
    path = [start]
    while path:
        antichain = path[-1]
        if antichain not in following:
            following[antichain] = _steps(graph, antichain)[::-1]
        if following[antichain]:
            after = following[antichain].pop()
            if after not in following:
                path.append(after)
        else:
            left.append(path.pop())
        if len(following) > MAX_STATES:
            return []
    return [_downset(graph, antichain) for antichain in reversed(left)]


def _downset(graph: BlockGraph, antichain: Sequence[int]) -> int:
    inside = bitset(antichain)
    for block in antichain:
        inside |= graph.ancestors[block]
    return inside


def _augmented(graph: BlockGraph, antichain: Sequence[int]) -> list[int]:
    """The antichain and every ancestor with a reader outside what one of its operators needs."""
    extra = 0
    for block in antichain:
        above = graph.ancestors[block]
        for before in bits(above & ~extra):
            if graph.successors[before] & ~(above | 1 << block):
                extra |= 1 << before
    return [*bits(extra), *(block for block in antichain if not extra >> block & 1)]


def _steps(graph: BlockGraph, antichain: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The antichains that follow: one operator of the augmented antichain steps on."""
    augmented = _augmented(graph, antichain)
    members = bitset(augmented)
    steps = []
    for block in augmented:
        for after in bits(graph.successors[block]):
            if after not in antichain and not graph.descendants[after] & members:
                moved = {after if member == block else member for member in augmented}
                steps.append(_maximal(graph, moved))
    return steps


def _maximal(graph: BlockGraph, blocks: set[int]) -> tuple[int, ...]:
    """The blocks on which no other block of the set depends."""
    inside = bitset(blocks)
    return tuple(sorted(b for b in blocks if not graph.descendants[b] & inside))


@dataclass(frozen=True)
class _Level:
    """One level of the hierarchy, solved.

    Args:
        best_s: of the stages between two states; shape (devices, starts, states). The outermost
            level starts only at the empty state.
        split, tail: start and devices of the last stage; -1 if there is one stage on all devices.
    """

    best_s: Floats
    split: Integers
    tail: Integers


def solved(
    profile: Profile,
    work: Work,
    counts: Sequence[int],
    bandwidths: Sequence[float],
    *,
    straight: bool,
) -> PolicyPlan:
    """The plan for a hierarchy.

    Args:
        counts: devices in the innermost group, groups in the next, and so on.
        bandwidths: bytes per second of each level.
        straight: whether every stage has one replica.
    """
    states = antichain_states(profile)
    prefixes = Prefixes.of(profile, states, work.micro_batch_size)
    times = prefixes.time_s[None, :] - prefixes.time_s[:, None]
    times = np.where(states.follows, times, np.inf)
    levels: list[_Level] = []
    inner = 1
    for count, bandwidth in zip(counts, bandwidths, strict=True):
        starts = len(states) if len(levels) + 1 < len(counts) else 1
        level = _level(prefixes, times, count, bandwidth, inner, starts, straight=straight)
        levels.append(level)
        times = levels[-1].best_s[-1]
        inner *= count
    if not levels:
        last = len(states) - 1
        return PolicyPlan(states, (0, last), ((0,),), float(prefixes.time_s[-1]))
    stages = _stages(levels, len(counts) - 1, (0, len(states) - 1), counts[-1], 1)
    cuts = (0, *(end for _, end, _ in stages))
    ranks = consecutive(tuple(replicas for _, _, replicas in stages))
    return PolicyPlan(states, cuts, ranks, float(times[0, -1]))


def _level(
    prefixes: Prefixes,
    times: Floats,
    count: int,
    bandwidth: float,
    inner: int,
    starts: int,
    *,
    straight: bool,
) -> _Level:
    """Solve a level of up to ``count`` groups of ``inner`` devices each."""
    weights = np.maximum(prefixes.trained_bytes[None, :] - prefixes.trained_bytes[:, None], 0)
    single = [
        (times + 4 * (m - 1) * weights / (bandwidth * m) / inner) / m
        if m == 1 or not straight
        else np.full_like(times, np.inf)
        for m in range(1, count + 1)
    ]
    sends = 2 * prefixes.output_bytes / bandwidth
    best = np.array(single)[:, :starts].copy()
    split = np.full(best.shape, -1, np.int64)
    tail = np.full(best.shape, -1, np.int64)
    for devices in range(2, count + 1):
        for last in range(1, devices):
            head = np.maximum(best[devices - last - 1], (sends / last)[None, :])
            _join(best, split, tail, devices - 1, last, head, single[last - 1])
    return _Level(best, split, tail)


def _join(
    best: Floats,
    split: Integers,
    tail: Integers,
    entry: int,
    last: int,
    head: Floats,
    single: Floats,
) -> None:
    """Try every state as the start of the last stage, for all pairs of ends at once."""
    for end in range(len(single)):
        values = np.maximum(head, single[:, end][None, :])
        where = values.argmin(axis=1)
        least = values[np.arange(len(values)), where]
        better = least < best[entry, :, end]
        best[entry, better, end] = least[better]
        split[entry, better, end] = where[better]
        tail[entry, better, end] = last


def _stages(
    levels: Sequence[_Level], level: int, ends: tuple[int, int], devices: int, copies: int
) -> list[tuple[int, int, int]]:
    """(start, end, replicas) of the stages between two states on groups of a level."""
    if level < 0:
        return [(*ends, copies)]
    stages: list[tuple[int, int, int]] = []
    start, end = ends
    inside = levels[level - 1].best_s.shape[0] if level else 1
    while levels[level].tail[devices - 1, start, end] > 0:
        at = int(levels[level].split[devices - 1, start, end])
        last = int(levels[level].tail[devices - 1, start, end])
        stages = [*_stages(levels, level - 1, (at, end), inside, copies * last), *stages]
        devices, end = devices - last, at
    return [*_stages(levels, level - 1, (start, end), inside, copies * devices), *stages]
