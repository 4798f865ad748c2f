"""What spans cost as stages: picoseconds of computing, and of sending what crosses their border."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.link import Link
from pipectl.planner.graphs.condense import Condensed, Held
from pipectl.planner.graphs.spans import Boundary, Items, Spans, States
from pipectl.profile import StageOverhead

PER_SECOND = 10**12
"""Loads are counted in picoseconds."""


@dataclass(frozen=True)
class Costs:
    """What blocks and messages cost at one micro-batch size.

    Args:
        compute_s: forward and backward of every block, in stages whose data stays in the cache.
        uncached_s: the same in other stages.
        least_s, least_uncached_s: both without operators of merged negligible blocks.
        scale: micro-batch size over the profile's, which sizes of messages are given for.
        link: what messages pass through.
        speeds: of each kind of device.
        overhead: says when data stays in the cache.
    """

    compute_s: Sequence[float]
    uncached_s: Sequence[float]
    least_s: Sequence[float]
    least_uncached_s: Sequence[float]
    scale: float
    link: Link
    speeds: Sequence[float]
    overhead: StageOverhead = field(default_factory=StageOverhead)

    @property
    def least(self) -> Costs:
        """If merged negligible blocks took no time."""
        return replace(self, compute_s=self.least_s, uncached_s=self.least_uncached_s)

    @property
    def cache_matters(self) -> bool:
        """Whether the time of a block depends on the stage it is in."""
        return tuple(self.compute_s) != tuple(self.uncached_s)


class Loads:
    """Loads of the spans between some states.

    Whether a stage's data stays in the cache depends on its parameters, on what it saves, and on
    what it receives and sends. Of the last, only some is saved besides; without it the load is at
    its least (``compute``), with all of it at its most (``most_compute``).
    """

    def __init__(self, graph: Condensed, downsets: Sequence[int], costs: Costs) -> None:
        self._graph = graph
        self._costs = costs
        self.states = States(graph, downsets, _picoseconds(costs.compute_s))

    def compute(self, spans: Spans) -> Integers:
        """At least, on each kind of device; shape [kinds, spans]."""
        return self._compute(spans, None)

    def most_compute(self, spans: Spans) -> Integers:
        """At most; shape [kinds, spans]."""
        return self._compute(spans, self._boundary.crossing(spans))

    def sending(self, spans: Spans) -> Integers:
        """Time of all bytes that cross the border; shape [spans].

        Values between two stages travel as one message, so latency is no matter of the cut.
        """
        crossing = self._boundary.crossing(spans).astype(np.float64) * self._costs.scale
        times: Integers = np.rint(hold_s(self._costs.link, crossing) * PER_SECOND).astype(np.int64)
        return times

    def _compute(self, spans: Spans, crossing: Integers | None) -> Integers:
        amounts = spans.compute.astype(np.float64)
        if self._costs.cache_matters:
            amounts += spans.between(self._extra) * self._uncached(spans, crossing)
        speeds = np.array(self._costs.speeds, dtype=float)
        loads: Integers = np.rint(amounts / speeds[:, None]).astype(np.int64)
        return loads

    def _uncached(self, spans: Spans, crossing: Integers | None) -> Floats:
        """Share of the way from cached to uncached times."""
        cache_bytes = self._costs.overhead.cache_bytes
        if not cache_bytes:
            return np.ones(len(spans))
        saved = self._saved.touched(spans)
        if crossing is not None:
            saved = saved + crossing
        working_set = 2 * self._parameters.touched(spans) + saved * self._costs.scale
        return uncached_shares(working_set, cache_bytes)

    @cached_property
    def _extra(self) -> Integers:
        """What every state takes more than in the cache."""
        pairs = zip(self._costs.uncached_s, self._costs.compute_s, strict=True)
        return self.states.sums([max(0.0, slow - fast) for slow, fast in pairs], PER_SECOND)

    @cached_property
    def _boundary(self) -> Boundary:
        values = self._graph.values
        sizes = [value.size_bytes + value.gradient_bytes for value in values]
        weights = np.array(sizes, dtype=np.int64)
        return Boundary(self.states, Items([value.blocks for value in values], weights))

    @cached_property
    def _parameters(self) -> Boundary:
        return Boundary(self.states, items_of(self._graph.parameters))

    @cached_property
    def _saved(self) -> Boundary:
        return Boundary(self.states, items_of(self._graph.saved))


def items_of(held: Sequence[Held]) -> Items:
    """What blocks name as items."""
    weights = np.array([size for _, size in held], dtype=np.int64)
    return Items([users for users, _ in held], weights)


def uncached_shares(working_set_bytes: Floats, cache_bytes: int) -> Floats:
    """:meth:`pipectl.profile.StageOverhead.uncached` of many stages."""
    shares: Floats = np.clip(2 * (working_set_bytes / cache_bytes - 1), 0.0, 1.0)
    return shares


def hold_s(link: Link, sizes: Floats) -> Floats:
    """:meth:`pipectl.link.Link.hold_s` of many sizes."""
    if not link.timings:
        return sizes / link.bandwidth_bytes_per_s
    known, times = np.array(link.timings, dtype=float).T
    beyond = np.maximum(sizes - known[-1], 0.0) / link.bandwidth_bytes_per_s
    held: Floats = np.maximum(np.interp(sizes, known, times) + beyond - link.latency_s, 0.0)
    return held


def _picoseconds(times_s: Sequence[float]) -> list[int]:
    return [round(time * PER_SECOND) for time in times_s]
