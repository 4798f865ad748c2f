"""Combinations of stages and micro-batch sizes, and the cuts that are proposed for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf

import numpy as np

from pipectl.planner.bounds import area_bound_s, longest_path_s
from pipectl.planner.costs.devices import Mix, every_placement, one_each
from pipectl.planner.graph.downsets import CutSpace, Enumeration
from pipectl.planner.judge import Candidate, Judge, Outcome, Simplicity
from pipectl.planner.partition.cutter import Cut, Cutter, fewest_of_table
from pipectl.planner.partition.layout import Choice, Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import Order

MAX_LAYOUTS = 300
"""An area with fewer partitions times placements is tried in full."""
SMALL_GRAPH, SMALL_GRAPH_FACTOR = 10, 50
"""Graphs of at most ``SMALL_GRAPH`` blocks may have ``SMALL_GRAPH_FACTOR`` times as many."""
OVERFULL = 1.5
"""Factor, plus the relative excess, of the estimates of candidates with replicas whose ranks exceed
their memory limit."""


@dataclass(frozen=True)
class Area:
    """A number of stages and a micro-batch size.

    Args:
        size: samples of a micro-batch.
        least_s: lower bound on the step.
    """

    stages: int
    size: int
    micro_batches: int
    least_s: float


class Areas:
    """The areas of a problem, their cuts and layouts, each computed once.

    Args:
        counts: numbers of stages to try, ascending.
        cutter: cuts the search space.
    """

    def __init__(
        self, problem: Problem, space: CutSpace, counts: Sequence[int], cutter: Cutter
    ) -> None:
        self.counts = counts
        self._problem = problem
        self._space = space
        self._cutter = cutter
        self._known: dict[tuple[int, int], Area] = {}
        self._cuts: dict[tuple[int, int], list[Cut]] = {}
        self.sizes = cache(problem.sizes)
        self._least_work = cache(self._find_least_work)
        self._every_layout = cache(self._find_every_layout)
        # Speeds of all devices, the fastest first, and the work per second of all cores, however
        # many ranks share them.
        self._speeds = [pool.speed for pool in problem.devices for _ in pool.ranks]
        nodes = problem.cluster.nodes
        self._capacity = sum(min(node.ranks, node.cores) * node.device.speed for node in nodes)

    @cached_property
    def all(self) -> list[Area]:
        """Every area whose stages could hold the model."""
        return [
            self.of(stages, size)
            for stages in self.counts
            if self._problem.could_hold(stages)
            for size in self.sizes(stages)
        ]

    @property
    def known(self) -> list[Area]:
        """Every area, and those that :meth:`of` was called with."""
        return list(dict.fromkeys([*self.all, *self._known.values()]))

    def sizes_known(self, stages: int) -> set[int]:
        """Sizes of all areas of a number of stages."""
        return {area.size for area in self.known if area.stages == stages}

    def of(self, stages: int, size: int) -> Area:
        """One area, with its bound."""
        if (stages, size) not in self._known:
            problem, shares = self._problem, self._problem.shares(size)
            total_s, largest_s, path_s = self._least_work(size)
            bottleneck_s = max(total_s / sum(self._speeds[:stages]), largest_s / self._speeds[0])
            least_s = area_bound_s(bottleneck_s, path_s, shares, stages, self._speeds[0])
            least_s = max(least_s, sum(shares) * total_s / self._capacity)
            area = Area(stages, size, problem.micro_batches(size), least_s)
            self._known[stages, size] = area
        return self._known[stages, size]

    @cached_property
    def reference_size(self) -> int:
        """The size that stages are cut for first: the measured one if the request allows it."""
        measured = self._problem.profile.micro_batch_size
        sizes = self.sizes(self.counts[-1])
        return min(sizes, key=lambda size: (abs(size - measured), size))

    def cuts(self, stages: int, size: int | None = None) -> list[Cut]:
        """Good partitions into a number of stages, cut for a micro-batch size."""
        size = size or self.reference_size
        if (stages, size) not in self._cuts:
            mixes = self.mixes(stages)
            cuts = [cut for mix in mixes for cut in self._cutter.partitions(stages, size, mix)]
            self._cuts[stages, size] = list(dict.fromkeys(cuts))
        return self._cuts[stages, size]

    def everything(self, area: Area) -> list[Layout] | None:
        """All layouts of an area; None if there are more than the limit."""
        return self._every_layout(area.stages)

    def _find_every_layout(self, stages: int) -> list[Layout] | None:
        most = MAX_LAYOUTS * (SMALL_GRAPH_FACTOR if len(self._problem.graph) <= SMALL_GRAPH else 1)
        if self._enumeration is None or self._enumeration.count(stages) > most:
            return None
        places = every_placement(self._problem.cluster, stages, MAX_LAYOUTS)
        if not places or self._enumeration.count(stages) > most // len(places):
            return None
        partitions = self._enumeration.every_partition(stages)
        ranks = list(map(one_each, places))
        return [Layout(partition, place) for partition in partitions for place in ranks]

    @cached_property
    def _enumeration(self) -> Enumeration | None:
        """The lister of all partitions; None if there are always too many."""
        few = len(self._space) <= MAX_LAYOUTS * 4
        whole = self._space.complete and not self._space.moved
        return Enumeration(self._space.downsets) if few and whole else None

    def mixes(self, stages: int) -> list[Mix]:
        """Ways in which a number of stages can use the devices."""
        if len(self._problem.devices) == 1:
            fewest = fewest_of_table(stages)
            sharing = [count for count in self.counts if fewest_of_table(count) == fewest]
            return [Mix.ordered([0] * max(stages, *sharing), 1)]
        return self._cutter.mixes(stages)

    def _find_least_work(self, size: int) -> tuple[float, float, float]:
        """Seconds of all blocks, of the largest block, and of the longest path."""
        times = self._problem.block_times(size, self._space.moved, cached=True)
        return sum(times), max(times), longest_path_s(self._problem.graph, times)


class Candidates:
    """Every layout in every order, by estimate and then by simplicity.

    Args:
        orders: by default all open orders for the stages of each layout.
        with_replicas: whether stages may have replicas. If so, only the two orders with the fewest
            micro-batches in flight are tried, and :data:`OVERFULL` applies.
        only_fitting: whether layouts that certainly do not fit in any order are left out.

    Attributes:
        taken: candidates taken so far.
        some_left_out: whether some layouts were left out.
    """

    def __init__(
        self,
        problem: Problem,
        layouts: Sequence[Layout],
        size: int,
        orders: Sequence[Order] | None = None,
        *,
        with_replicas: bool = False,
        only_fitting: bool = False,
    ) -> None:
        self._problem = problem
        self._layouts = list(dict.fromkeys(layouts))
        self._size = size
        self._orders: list[Order] = []
        self.taken: list[Candidate] = []
        self.some_left_out = False
        by_stages: dict[int, list[int]] = {}
        for place, layout in enumerate(self._layouts):
            by_stages.setdefault(len(layout.partition), []).append(place)
        columns = []  # place, order, recomputed stages, micro-batches in flight, estimate
        for stages, places in by_stages.items():
            fresh = orders or problem.orders(stages, size)
            fresh = fresh[:2] if with_replicas else fresh
            numbers = np.arange(len(self._orders), len(self._orders) + len(fresh))
            self._orders += fresh
            chosen, warm_ups = [self._layouts[place] for place in places], [w for _, w in fresh]
            excess = problem.estimator.excess(chosen, size, warm_ups)
            if only_fitting:
                kept = np.flatnonzero((excess <= 0).any(axis=1)).tolist()
                self.some_left_out |= len(kept) < len(places)
                if not kept:
                    continue
                excess, chosen = excess[kept], [chosen[row] for row in kept]
                places = [places[row] for row in kept]
            steps_s = problem.estimator.steps_s(chosen, size, warm_ups)
            if with_replicas:
                steps_s = np.where(excess > 0, steps_s * (OVERFULL + excess), steps_s)
            columns.append(
                (
                    np.repeat(places, len(fresh)),
                    np.tile(numbers, len(places)),
                    np.repeat([sum(layout.recompute) for layout in chosen], len(fresh)),
                    np.tile(list(map(sum, warm_ups)), len(places)),
                    steps_s.ravel(),
                    excess.ravel() <= 0,
                )
            )
        self._ranking: list[tuple[int, int, float, bool]] = []
        if columns:
            joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
            ranked = np.lexsort((joined[3], joined[2], joined[4]))
            rows = (joined[column][ranked].tolist() for column in (0, 1, 4, 5))
            self._ranking = list(zip(*rows, strict=True))

    @property
    def next_s(self) -> float:
        """Estimate of the next candidate; infinite if all are taken."""
        place = len(self.taken)
        return self._ranking[place][2] if place < len(self._ranking) else inf

    @property
    def simplicity(self) -> Simplicity:
        """Simplicity of the next candidate; there must be one."""
        return self._candidate(*self._ranking[len(self.taken)]).simplicity

    def take(self) -> Candidate:
        """Take the next candidate; there must be one."""
        self.taken.append(self._candidate(*self._ranking[len(self.taken)]))
        return self.taken[-1]

    def __iter__(self) -> Iterator[Candidate]:
        """All candidates; takes none."""
        return (self._candidate(*row) for row in self._ranking)

    def best_of_orders(self) -> Iterator[Candidate]:
        """The most promising layout in every order; takes none."""
        best: dict[int, tuple[int, int, float, bool]] = {}
        for row in self._ranking:
            best.setdefault(row[1], row)
        return (self._candidate(*row) for row in best.values())

    def best_of_layouts(self) -> Iterator[Candidate]:
        """Every layout in its most promising order; takes none."""
        best: dict[int, tuple[int, int, float, bool]] = {}
        for row in self._ranking:
            best.setdefault(row[0], row)
        return (self._candidate(*row) for row in best.values())

    def _candidate(self, place: int, number: int, estimate_s: float, may_fit: bool) -> Candidate:
        choice = Choice(self._layouts[place], self._size, *self._orders[number])
        count = self._problem.micro_batches(self._size)
        return Candidate(choice, count, estimate_s, may_fit)


def judge_promising(candidates: Candidates, judge: Judge) -> set[Outcome]:
    """Judge the candidates that could be best; what became of all."""
    outcomes = {Outcome.DOES_NOT_FIT} if candidates.some_left_out else set()
    while candidates.next_s < inf:
        if judge.is_beaten(candidates.next_s):
            return outcomes | {Outcome.BEATEN}
        outcomes.add(judge.judge(candidates.take()))
    return outcomes
