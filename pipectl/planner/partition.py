"""Good partitions of a graph into a given number of stages: optimal ones and near ties.

The smallest bottleneck is a lower bound on what a pipeline can do, but many partitions share it
or come close, and differ in what they send. So each number of stages gets several partitions: for
a few tolerances, the one that sends least with no stage above the bottleneck by more than that;
and the one with the smallest bottleneck when sending and receiving count as load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipectl.link import Link
from pipectl.planner.condense import Condensed
from pipectl.planner.dynamic import Chains, smallest_bottleneck, smallest_sum
from pipectl.planner.ideals import all_downsets, prefix_downsets
from pipectl.planner.negligible import merge_negligible
from pipectl.planner.spans import Boundary, Integers, Items, Partition, Spans, States, spans_by_end
from pipectl.profile import Profile

Floats = npt.NDArray[np.float64]

PER_SECOND = 10**12
"""The programme counts in picoseconds."""
MOST_DOWNSETS = 2000
"""Above, only a sample of the downsets is searched."""
NEGLIGIBLE = (0.001, 0.01)
"""Shares of the whole time that small blocks may take to be merged into others."""
TOLERANCES = (0.0, 0.02, 0.1)


@dataclass(frozen=True)
class Space:
    """What is searched: the downsets of a graph, all of them or a sample.

    Args:
        moved: operators of negligible blocks that were merged into others to get there.
    """

    graph: Condensed
    downsets: tuple[int, ...]
    complete: bool
    moved: tuple[int, ...] = ()

    @classmethod
    def of(cls, graph: Condensed, profile: Profile, cap: int = MOST_DOWNSETS) -> Space:
        """All downsets if there are at most ``cap``, or else as many as can be.

        That is those which part no negligible block from its neighbour, and if these are still too
        many, prefixes of several topological orders.
        """
        everything = all_downsets(graph, cap)
        if everything is not None:
            return cls(graph, tuple(everything), True)
        for share in NEGLIGIBLE:
            merged = merge_negligible(graph, profile, share)
            everything = all_downsets(merged.graph, cap)
            if everything is not None:
                return cls(merged.graph, tuple(everything), True, merged.moved)
        return cls.sample(graph, cap)

    @classmethod
    def sample(cls, graph: Condensed, cap: int = MOST_DOWNSETS) -> Space:
        """Prefixes of several topological orders."""
        return cls(graph, tuple(prefix_downsets(graph, cap)), False)


@dataclass(frozen=True)
class Costs:
    """What blocks and messages cost at one micro-batch size.

    Args:
        compute_s: forward and backward of every block.
        cached_s: the same at its least, in stages whose data stays in the cache.
        least_s: that, without operators of merged negligible blocks.
        scale: micro-batch size over the profile's, which sizes of messages are given for.
        link: what messages pass through.
        speeds: of the device of every stage, by position.
    """

    compute_s: Sequence[float]
    cached_s: Sequence[float]
    least_s: Sequence[float]
    scale: float
    link: Link
    speeds: Sequence[float]


@dataclass(frozen=True)
class Bound:
    """What is known of the smallest possible bottleneck.

    Args:
        load_s: no partition has a smaller one.
        exact: whether a partition has this one.
    """

    load_s: float
    exact: bool


class Partitioner:
    """Partitions of one graph under one set of costs.

    Args:
        most: largest number of stages that will be asked for.
        fewest: smallest one above 1 that will be asked for.
    """

    def __init__(self, space: Space, costs: Costs, *, fewest: int, most: int) -> None:
        self._graph = space.graph
        self._space = space
        self._costs = costs
        self._most = most
        self._fewest = min(max(2, fewest), most)
        self._compute = [round(time * PER_SECOND) for time in costs.compute_s]
        self._speeds = np.asarray(costs.speeds[:most], dtype=float)
        self._columns = self._speeds if len(set(costs.speeds[:most])) > 1 else self._speeds[:1]

    def bound(self, stages: int) -> Bound:
        """The proven lower bound on the bottleneck of so many stages."""
        best = self._bottlenecks.best(stages)
        speeds = self._speeds[:stages]
        least = [round(time * PER_SECOND) for time in self._costs.cached_s]
        share = sum(least) / float(speeds.sum())
        proven = max(share, max(least) / float(speeds.max()))
        if best is not None and (self._space.complete or stages == 1):
            proven = max(proven, self._least_bottleneck(stages, best))
        exact = best is not None and best <= proven + 1
        return Bound(proven / PER_SECOND, exact)

    def _least_bottleneck(self, stages: int, best: int) -> float:
        """The smallest bottleneck if blocks take their least and merged negligible ones nothing."""
        if not self._space.moved and self._costs.cached_s == self._costs.compute_s:
            return best
        space = replace(self._space, moved=())
        least_s = self._costs.least_s
        costs = replace(self._costs, compute_s=least_s, cached_s=least_s)
        free = Partitioner(space, costs, fewest=stages, most=stages)
        return free.bound(stages).load_s * PER_SECOND

    def partitions(self, stages: int) -> list[Partition]:
        """Distinct good partitions, the best balanced first."""
        if stages == 1:
            return [(self._graph.everything,)]
        best = self._bottlenecks.best(stages)
        if best is None:
            return []
        chains = [self._least_sent(round(best * (1 + extra))) for extra in TOLERANCES]
        chains.append(self._bottlenecks_with_messages)
        found = (self._states.cut(chain.states(stages)) for chain in chains)
        return list(dict.fromkeys(found))

    @cached_property
    def _states(self) -> States:
        return States(self._graph, self._space.downsets, self._compute)

    @cached_property
    def _spans(self) -> list[Spans]:
        """Spans that no optimum or near tie exceeds: a single order gives an upper bound."""
        order = [(1 << place) - 1 for place in range(len(self._graph) + 1)]
        states = States(self._graph, order, self._compute)
        spans = spans_by_end(states, self._boundary(states), int(states.compute[-1]))
        best = smallest_bottleneck(spans, self._most, self._load_with_messages)
        longest = (best.best(self._fewest) or 0) * float(self._speeds.max())
        window = int(longest * (1 + TOLERANCES[-1])) + 1
        return spans_by_end(self._states, self._boundary(self._states), window)

    def _boundary(self, states: States) -> Boundary:
        values = self._graph.values
        sizes = [value.size_bytes + value.gradient_bytes for value in values]
        weights = np.array(sizes, dtype=np.int64)
        return Boundary(states, Items([value.blocks for value in values], weights))

    @cached_property
    def _bottlenecks(self) -> Chains:
        return smallest_bottleneck(self._spans, self._most, self._load)

    @cached_property
    def _bottlenecks_with_messages(self) -> Chains:
        return smallest_bottleneck(self._spans, self._most, self._load_with_messages)

    def _least_sent(self, bound: int) -> Chains:
        return smallest_sum(self._spans, self._most, self._sending, self._load, bound)

    def _load(self, spans: Spans) -> Integers:
        """Compute by position (one column if devices are alike), in picoseconds."""
        loads: Integers = np.rint(spans.compute[:, None] / self._columns).astype(np.int64)
        return loads

    def _sending(self, spans: Spans) -> Integers:
        """Time of all bytes that cross the border, in picoseconds.

        Values between two stages travel as one message, so latency is no matter of the cut.
        """
        crossing = spans.crossing[:, None].astype(np.float64)
        scale, link = self._costs.scale, self._costs.link
        if link.timings:
            times = _hold_s(link, crossing * scale) * PER_SECOND
        else:
            times = crossing * (scale / link.bandwidth_bytes_per_s * PER_SECOND)
        sending: Integers = np.rint(times).astype(np.int64)
        return sending

    def _load_with_messages(self, spans: Spans) -> Integers:
        loads: Integers = self._load(spans) + self._sending(spans)
        return loads


def _hold_s(link: Link, sizes: Floats) -> Floats:
    """:meth:`pipectl.link.Link.hold_s` of many sizes, for a link with timings."""
    known, times = np.array(link.timings, dtype=float).T
    beyond = np.maximum(sizes - known[-1], 0.0) / link.bandwidth_bytes_per_s
    held: Floats = np.maximum(np.interp(sizes, known, times) + beyond - link.latency_s, 0.0)
    return held
