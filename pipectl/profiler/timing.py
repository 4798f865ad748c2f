"""Timing the operators of a graph where they run, at one micro-batch size.

The whole graph runs as one stage. If its data is more than the cache holds, it also runs in
windows that stay in the cache, one at a time: a stage of a long pipeline is like them. For what
stages take besides their operators, random stages are timed whole, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipectl.planner.costs.footprint import Footprints
from pipectl.profiler.bench import Bench, Subject, random_stages, whole, windows
from pipectl.profiler.effort import Rounds
from pipectl.profiler.fit import CACHE_SHARES, Sample
from pipectl.profiler.marks import Clock, Spent, clock_of, cost_of_measuring

Pairs = dict[str, tuple[float, float]]
"""(forward_s, backward_s) by operator."""
Advance = Callable[[float], None]
"""Called with the share of a measurement that is done."""
_COPIES = 20
_MIN_CUTS, _MAX_CUTS = 3, 12


@dataclass(frozen=True)
class Timed:
    """Times of every operator at one micro-batch size.

    Args:
        uncached: in the whole graph.
        cached: in stages whose data stays in the cache; empty if the whole graph's does.
        loading_s: to load a micro-batch; 0 if processes beside the rank do that.
    """

    uncached: Pairs
    cached: Pairs
    loading_s: float = 0.0


def time_operators(
    subject: Subject,
    states: Mapping[str, Tensor],
    working_set: Mapping[str, float],
    cache_bytes: int | None,
    rounds: Rounds,
    batches: Iterator[Any],
    advance: Advance,
) -> Timed:
    """Times of the operators, and of loading the micro-batches that ``batches`` yields.

    Args:
        states: parameters and buffers by full name.
        working_set: bytes that every operator touches, about.
        cache_bytes: as in :func:`fit_stages`.
    """
    graph, clock = subject.graph, clock_of(subject.device)
    cuts = [whole(graph)]
    if cache_bytes is not None:
        cuts.append(windows(graph, working_set, CACHE_SHARES[0] * cache_bytes))
    benches = [Bench(subject, states, cut) for cut in cuts]
    spent: list[list[Spent]] = [[] for _ in benches]
    loading_s: list[float] = []
    cost = cost_of_measuring(clock)

    def load() -> bool:
        """Whether there was a micro-batch; the training reports samples that cannot be loaded."""
        with suppress(Exception):
            return next(batches, None) is not None
        return False

    def run_round() -> None:
        start = time.perf_counter()
        if load():  # between runs of the model, whose data fills the caches
            loading_s.append(time.perf_counter() - start)
        for bench, runs in zip(benches, spent, strict=True):
            for index in range(len(bench)):
                bench.run(index)  # fills the caches
                runs.append(bench.run_marked(index, cost))
            bench.forget()  # cuts of one model take turns

    load()  # the first one starts the iterator
    repeat(rounds, run_round, advance)
    rewriting_s = _rewriting_s(subject, states, clock)
    uncached, *cached = [_medians(runs, rewriting_s) for runs in spent]
    return Timed(
        uncached, cached[0] if cached else {}, statistics.median(loading_s) if loading_s else 0.0
    )


def time_stages(
    subject: Subject,
    states: Mapping[str, Tensor],
    footprints: Footprints,
    rounds: Rounds,
    advance: Advance,
) -> list[Sample]:
    """Random stages and the whole graph, timed; more of them the less time they take."""
    graph, clock = subject.graph, clock_of(subject.device)
    benches = [Bench(subject, states, whole(graph))]
    start = clock()
    _run_whole(benches[0])
    affordable = rounds.budget_s / (rounds.least * (clock() - start))
    count = min(_MAX_CUTS, max(_MIN_CUTS, int(affordable)))
    benches += [Bench(subject, states, random_stages(graph, seed)) for seed in range(count)]
    times: list[list[list[tuple[float, float]]]] = [[] for _ in benches]

    def run_round() -> None:
        for bench, runs in zip(benches, times, strict=True):
            runs.append(_run_whole(bench))

    repeat(rounds, run_round, advance)
    samples = []
    for bench, runs in zip(benches, times, strict=True):
        inside = [bench.cut.operators(index) for index in range(len(bench))]
        parts = footprints.of([[graph.position[name] for name in names] for names in inside])
        for index, pairs in enumerate(zip(*runs, strict=True)):
            forward_s, backward_s = map(statistics.median, zip(*pairs, strict=True))
            samples.append(Sample(parts, index, forward_s, backward_s))
    return samples


def _run_whole(bench: Bench) -> list[tuple[float, float]]:
    """Forward and backward time of every stage; a run before fills the caches."""
    times = []
    for index in range(len(bench)):
        bench.run(index)
        times.append(bench.run(index))
    bench.forget()
    return times


def repeat(rounds: Rounds, run_round: Callable[[], None], advance: Advance) -> None:
    """Run everything round by round, so that a drift of the machine hits all alike."""
    start = time.perf_counter()
    for done in range(rounds.most):
        used = (time.perf_counter() - start) / rounds.budget_s
        if done >= rounds.least and used > 1:
            break
        run_round()
        advance(min(1.0, max((done + 1) / rounds.most, min(used, (done + 1) / rounds.least))))
    advance(1.0)


def _medians(runs: Sequence[Spent], rewriting_s: Mapping[str, float]) -> Pairs:
    """Medians of every operator, over the runs that have it."""
    forward: dict[str, list[float]] = {}
    backward: dict[str, list[float]] = {}
    for spent in runs:
        for name, forward_s in spent.forward_s.items():
            forward.setdefault(name, []).append(forward_s)
            backward.setdefault(name, []).append(spent.backward_s[name])
    return {
        name: (statistics.median(times) + rewriting_s[name], statistics.median(backward[name]))
        for name, times in forward.items()
    }


def _rewriting_s(subject: Subject, states: Mapping[str, Tensor], clock: Clock) -> dict[str, float]:
    """By operator, the time of the copies that a stage makes of buffers it rewrites."""
    graph = subject.graph

    def copying_s(placeholder: str) -> float:
        buffer = states[graph.states[placeholder].name]
        start = clock()
        for _ in range(_COPIES):
            copy = buffer.clone()
            copy.data = copy.detach()
        return (clock() - start) / _COPIES

    return {
        node.name: sum(copying_s(s.name) for s in node.all_input_nodes if s.name in graph.rewritten)
        for node in graph.operators
    }
