"""Timing the operators of a graph where they run, at one micro-batch size.

The whole graph runs as one stage. Where its data is more than the cache holds, it also runs in
windows that stay in the cache, one at a time: a stage of a long pipeline is like them. For what
stages take besides their operators, random stages are timed whole, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from torch import Tensor

from pipectl.planner.costs.footprint import Footprints
from pipectl.profiler.alone import AloneStages
from pipectl.profiler.cache import last_level_bytes
from pipectl.profiler.effort import Effort, Rounds
from pipectl.profiler.fit import CACHE_SHARES, Sample
from pipectl.profiler.marks import Cost, Spent, clock_of, cost_of_measuring
from pipectl.profiler.partitions import random_stages, whole, windows
from pipectl.profiler.records import Pairs, Timed
from pipectl.profiler.subject import Subject
from pipectl.runtime.device import CpuDevice

Advance = Callable[[float], None]
"""Called with the share of a measurement that is done."""
_COPIES = 20
_FEWEST_PARTITIONS, _MOST_PARTITIONS = 3, 12


class InPlace:
    """Times a graph.

    Args:
        states: parameters and buffers by full name.
        working_set: bytes that every operator touches, about.
    """

    def __init__(
        self,
        subject: Subject,
        states: Mapping[str, Tensor],
        working_set: Mapping[str, float],
        effort: Effort,
    ) -> None:
        self._graph = subject.graph
        self._subject = subject
        self._states = states
        self._working_set = working_set
        self._effort = effort
        self._clock = clock_of(subject.device)

    def operators(self, batches: Iterator[Any], advance: Advance) -> Timed:
        """Times of the operators, and of loading the micro-batches that ``batches`` yields."""
        cuts = [whole(self._graph), *self._windows]
        runs = [_MarkedRuns(self._stages(cut), self._cost, self._rewriting_s) for cut in cuts]
        loads = _Loads(batches)
        _repeat(self._effort.operators, [loads.round, *(each.round for each in runs)], advance)
        uncached, *cached = [each.operators() for each in runs]
        return Timed(uncached, cached[0] if cached else {}, loads.median_s())

    def samples(self, footprints: Footprints, advance: Advance) -> list[Sample]:
        """Random stages and the whole graph, timed; more of them the less time they take."""
        runs = [_WholeRuns(self._stages(whole(self._graph)))]
        start = self._clock()
        runs[0].round()
        rounds = self._effort.stages
        affordable = rounds.budget_s / (rounds.least * (self._clock() - start))
        count = min(_MOST_PARTITIONS, max(_FEWEST_PARTITIONS, int(affordable)))
        cuts = [random_stages(self._graph, seed) for seed in range(count)]
        runs += [_WholeRuns(self._stages(cut)) for cut in cuts]
        _repeat(rounds, [each.round for each in runs], advance)
        return [sample for each in runs for sample in each.samples(footprints)]

    @cached_property
    def cache_bytes(self) -> int | None:
        """The last level cache; None on an accelerator, or if all data is in a small part of it."""
        if not isinstance(self._subject.device, CpuDevice):
            return None
        known = last_level_bytes()
        return known if sum(self._working_set.values()) > CACHE_SHARES[0] * known else None

    def _stages(self, cut: Mapping[str, int]) -> AloneStages:
        return AloneStages(self._subject, self._states, cut)

    @property
    def _windows(self) -> list[dict[str, int]]:
        if self.cache_bytes is None:
            return []
        return [windows(self._graph, self._working_set, CACHE_SHARES[0] * self.cache_bytes)]

    @cached_property
    def _cost(self) -> Cost:
        return cost_of_measuring(self._clock)

    @cached_property
    def _rewriting_s(self) -> dict[str, float]:
        """By operator, the time of the copies that a stage makes of buffers it rewrites."""
        found = {}
        for node in self._graph.operators:
            names = [s.name for s in node.all_input_nodes if s.name in self._graph.rewritten]
            buffers = [self._states[self._graph.states[name].name] for name in names]
            found[node.name] = sum(self._copying_s(buffer) for buffer in buffers)
        return found

    def _copying_s(self, buffer: Tensor) -> float:
        start = self._clock()
        for _ in range(_COPIES):
            copy = buffer.clone()
            copy.data = copy.detach()
        return (self._clock() - start) / _COPIES


class _Loads:
    """Micro-batches that are loaded between runs of the model, whose data fills the caches."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._times: list[float] = []
        self._load()  # the first one starts the iterator

    def round(self) -> None:
        """Load one micro-batch."""
        start = time.perf_counter()
        if self._load():
            self._times.append(time.perf_counter() - start)

    def median_s(self) -> float:
        """Seconds for each; 0 if none was loaded."""
        return statistics.median(self._times or [0.0])

    def _load(self) -> bool:
        """Whether there was one; samples that cannot be loaded are for the training to report."""
        with suppress(Exception):
            return next(self._batches, None) is not None
        return False


class _MarkedRuns:
    """The stages of a cut and where the time of their runs went."""

    def __init__(self, stages: AloneStages, cost: Cost, rewriting_s: Mapping[str, float]) -> None:
        self._stages = stages
        self._cost = cost
        self._rewriting_s = rewriting_s
        self._spent: list[list[Spent]] = [[] for _ in range(len(stages))]

    def round(self) -> None:
        """Run every stage twice, the second time with marks: the first fills the caches.

        Gradients do not stay: many cuts of one model take turns.
        """
        for index, spent in enumerate(self._spent):
            self._stages.run(index)
            spent.append(self._stages.run_marked(index, self._cost))
        self._stages.forget()

    def operators(self) -> Pairs:
        """Medians of every operator."""
        found: Pairs = {}
        for spent in self._spent:
            for name in spent[0].forward_s:
                forward_s = statistics.median(each.forward_s[name] for each in spent)
                backward_s = statistics.median(each.backward_s[name] for each in spent)
                found[name] = (forward_s + self._rewriting_s[name], backward_s)
        return found


class _WholeRuns:
    """The stages of a cut and the times of their runs."""

    def __init__(self, stages: AloneStages) -> None:
        self._stages = stages
        self._times: list[list[tuple[float, float]]] = [[] for _ in range(len(stages))]

    def round(self) -> None:
        """Run every stage twice: the first time fills the caches."""
        for index, times in enumerate(self._times):
            self._stages.run(index)
            times.append(self._stages.run(index))
        self._stages.forget()

    def samples(self, footprints: Footprints) -> list[Sample]:
        """Every stage as a whole."""
        cut = self._stages.cut
        names = [cut.operators(index) for index in range(len(self._stages))]
        parts = footprints.of([[cut.graph.position[name] for name in inside] for inside in names])
        medians = [map(statistics.median, zip(*times, strict=True)) for times in self._times]
        return [Sample(parts, index, *pair) for index, pair in enumerate(medians)]


def _repeat(rounds: Rounds, each: Sequence[Callable[[], None]], advance: Advance) -> None:
    """Run everything round by round, so that a drift of the machine hits all alike."""
    start = time.perf_counter()
    for done in range(rounds.most):
        used = (time.perf_counter() - start) / rounds.budget_s
        if done >= rounds.least and used > 1:
            break
        for run in each:
            run()
        advance(min(1.0, max((done + 1) / rounds.most, min(used, (done + 1) / rounds.least))))
    advance(1.0)
