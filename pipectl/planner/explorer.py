"""What can be tried with one rank per stage, and the queue in which it waits.

An area is a number of stages and a micro-batch size, with the cuts that the dynamic programme
proposes for it, or all there are. See :mod:`pipectl.planner.search` for the course of the search.
One that ends before it has judged anything falls back to even cuts of the graph's own order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import islice, pairwise
from math import inf

import numpy as np

from pipectl.errors import OutOfTimeError
from pipectl.planner.bounds import longest_path_s, outlook_s
from pipectl.planner.costs.devices import (
    Mix,
    Placement,
    every_placement,
    mixes,
    one_each,
    placements,
)
from pipectl.planner.graph.blocks import bitset
from pipectl.planner.graph.downsets import Enumeration, Partition
from pipectl.planner.judge import Candidate, Candidates, Judge, Verdict, family_of
from pipectl.planner.partition.cut_space import CutSpace
from pipectl.planner.partition.cutter import Bound, Cut, Cutter, plain_fit
from pipectl.planner.partition.estimate import Layout
from pipectl.planner.partition.moves import neighbours
from pipectl.planner.partition.plans import Choice
from pipectl.planner.partition.programme import Check
from pipectl.planner.problem import Problem
from pipectl.planner.request import Order, micro_batch_sizes, open_orders
from pipectl.profile import Profile

MICRO_BATCHES_PER_STAGE = 8
"""More add little: the bubble is then about a tenth."""
MICRO_BATCHES_IF_PROPORTIONAL = 4
"""The same where what a small micro-batch costs was not measured but scaled from a larger one."""
MAX_LAYOUTS = 300
"""An area with fewer partitions times placements is tried in full."""
SMALL, MORE = 10, 50
"""Graphs of so few blocks may have this many times as many."""


def most_micro_batches(profile: Profile, stages: int) -> int:
    """How many are worth trying with so many stages."""
    several = profile.has_several_sizes
    return stages * (MICRO_BATCHES_PER_STAGE if several else MICRO_BATCHES_IF_PROPORTIONAL)


@dataclass(frozen=True)
class Area:
    """A number of stages and a micro-batch size.

    Args:
        size: samples of a micro-batch.
        least_s: no plan with them has a shorter step.
    """

    stages: int
    size: int
    micro_batches: int
    least_s: float


class Areas:
    """The areas of a problem, and what is in them.

    Args:
        counts: numbers of stages to try, ascending.
        check: called now and then; raises to end the search.
    """

    def __init__(
        self, problem: Problem, space: CutSpace, counts: Sequence[int], check: Check
    ) -> None:
        self.counts = counts
        self._problem = problem
        self._space = space
        self._cutter = Cutter(problem, space, check)
        self._paths: dict[int, float] = {}
        self._known: dict[tuple[int, int], Area] = {}
        self._cuts: dict[tuple[int, int], list[Cut]] = {}
        self._times: dict[int, list[float]] = {}
        self._work: dict[int, tuple[float, float]] = {}
        self._sizes: dict[int, list[int]] = {}
        self._everything: dict[int, list[Layout] | None] = {}
        self._places: dict[tuple[int, ...], list[Placement]] = {}

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
        """Every area, with those besides that were asked for."""
        return list(dict.fromkeys([*self.all, *self._known.values()]))

    def of(self, stages: int, size: int) -> Area:
        """One area, with its bound."""
        if (stages, size) not in self._known:
            problem = self._problem
            speeds = self._fastest(stages)
            bottleneck_s = self.quick_bound(stages, size).load_s
            shares = problem.shares(size)
            least_s = outlook_s(bottleneck_s, self._path_s(size), shares, stages, speeds[0])
            least_s = max(least_s, sum(shares) * self._least_work(size)[0] / self._capacity)
            area = Area(stages, size, problem.micro_batches(size), least_s)
            self._known[stages, size] = area
        return self._known[stages, size]

    @cached_property
    def reference_size(self) -> int:
        """The size stages are first cut for: the one that was measured, if it is open."""
        measured = self._problem.profile.micro_batch_size
        sizes = self.sizes(self.counts[-1])
        return min(sizes, key=lambda size: (abs(size - measured), size))

    def cuts(self, stages: int, size: int | None = None) -> list[Cut]:
        """Good partitions into so many stages, cut for a size."""
        size = size or self.reference_size
        if (stages, size) not in self._cuts:
            ways = self.mixes(stages)
            found = [cut for mix in ways for cut in self._cutter.partitions(stages, size, mix)]
            self._cuts[stages, size] = list(dict.fromkeys(found))
        return self._cuts[stages, size]

    def layouts(self, cuts: Iterable[Cut]) -> list[Layout]:
        """Cuts with every placement."""
        return [
            Layout(cut.partition, one_each(place), self._recompute(cut))
            for cut in cuts
            for place in self._placements(cut.kinds)
        ]

    def _placements(self, kinds: tuple[int, ...]) -> list[Placement]:
        if kinds not in self._places:
            problem = self._problem
            self._places[kinds] = placements(problem.cluster, problem.devices, kinds)
        return self._places[kinds]

    def everything(self, area: Area) -> list[Layout] | None:
        """All layouts of an area without recomputation; None if they are many."""
        if area.stages not in self._everything:
            self._everything[area.stages] = self._every_layout(area.stages)
        return self._everything[area.stages]

    def _every_layout(self, stages: int) -> list[Layout] | None:
        most = MAX_LAYOUTS * (MORE if len(self._problem.graph) <= SMALL else 1)
        if self._enumeration is None or self._enumeration.count(stages) > most:
            return None
        places = every_placement(self._problem.cluster, stages, MAX_LAYOUTS)
        if not places or self._enumeration.count(stages) > most // len(places):
            return None
        partitions = self._enumeration.every_partition(stages)
        again = (True,) * stages if self._problem.request.recompute else ()
        ranks = list(map(one_each, places))
        return [Layout(partition, held, again) for partition in partitions for held in ranks]

    @cached_property
    def _enumeration(self) -> Enumeration | None:
        """Where partitions can be few."""
        few = len(self._space) <= MAX_LAYOUTS * 4
        whole = self._space.complete and not self._space.moved
        return Enumeration(self._space.downsets) if few and whole else None

    def bound(self, stages: int, size: int) -> Bound:
        """What is proven about partitions into so many stages."""
        return self._cutter.bound(stages, size, self.mixes(stages), self._fastest(stages))

    def quick_bound(self, stages: int, size: int) -> Bound:
        """The same from sums alone."""
        total_s, largest_s = self._least_work(size)
        speeds = self._fastest(stages)
        return Bound(max(total_s / sum(speeds), largest_s / speeds[0]), False)

    def mixes(self, stages: int) -> list[Mix]:
        """Ways for so many stages to use the devices."""
        if len(self._problem.devices) == 1:
            most = max([n for n in self.counts if n.bit_length() == stages.bit_length()], default=0)
            return [Mix.ordered([0] * max(most, stages), 1)]
        return mixes(self._problem.devices, len(self._space), stages, stages)

    def _recompute(self, cut: Cut) -> tuple[bool, ...]:
        everywhere = self._problem.request.recompute
        return (True,) * len(cut.partition) if everywhere else cut.recompute

    def orders(self, stages: int, size: int) -> list[Order]:
        """Schedules and warm-ups, the one with the fewest micro-batches in flight first."""
        return open_orders(self._problem.request, stages, self._problem.micro_batches(size))

    def sizes(self, stages: int) -> list[int]:
        """Micro-batch sizes worth trying with so many stages."""
        if stages not in self._sizes:
            most = most_micro_batches(self._problem.profile, stages)
            self._sizes[stages] = micro_batch_sizes(self._problem.request, most)
        return self._sizes[stages]

    def _fastest(self, stages: int) -> list[float]:
        """Speeds of the fastest devices."""
        return self._speeds[:stages]

    @cached_property
    def _capacity(self) -> float:
        """Work that all cores do in a second, however many ranks share them."""
        nodes = self._problem.cluster.nodes
        return sum(min(node.ranks, node.cores) * node.device.speed for node in nodes)

    @cached_property
    def _speeds(self) -> list[float]:
        """Of all devices, the fastest first."""
        return [pool.speed for pool in self._problem.devices for _ in pool.ranks]

    def _least_times(self, size: int) -> list[float]:
        if size not in self._times:
            moved = self._space.moved
            self._times[size] = self._problem.block_times(size, moved, cached=True)
        return self._times[size]

    def _least_work(self, size: int) -> tuple[float, float]:
        """Of all blocks together, and of the largest."""
        if size not in self._work:
            times = self._least_times(size)
            self._work[size] = sum(times), max(times)
        return self._work[size]

    def _path_s(self, size: int) -> float:
        if size not in self._paths:
            times = self._least_times(size)
            self._paths[size] = longest_path_s(self._problem.graph, times)
        return self._paths[size]


_MICRO_BATCHES_PER_STAGE = 4


def first_choices(problem: Problem, counts: Sequence[int]) -> Iterator[tuple[Layout, int, Order]]:
    """Even cuts of the graph's own order into the most stages and the fewest.

    With micro-batches near the measured size, and with the smallest that are worth a try, which
    need the least memory; of schedules the one with the fewest micro-batches in flight.

    Args:
        counts: numbers of stages that are allowed, ascending.
    """
    measured, request = problem.profile.micro_batch_size, problem.request
    for stages in dict.fromkeys((counts[-1], counts[0])):
        sizes = micro_batch_sizes(request, _MICRO_BATCHES_PER_STAGE * stages)
        near = min(sizes, key=lambda size: (abs(size - measured), size))
        for size in dict.fromkeys((near, min(sizes))):
            order = open_orders(request, stages, problem.micro_batches(size))[0]
            again = (bool(request.recompute),) * stages if request.recompute else ()
            cut = _even(problem.block_times(size), stages)
            yield Layout(cut, one_each(_fastest(problem, stages)), again), size, order


def _fastest(problem: Problem, stages: int) -> tuple[int, ...]:
    ranks = [rank for pool in problem.devices for rank in pool.ranks]
    return tuple(sorted(ranks[:stages]))


def _even(times: Sequence[float], stages: int) -> Partition:
    """Consecutive blocks, at least one a stage, cut where the sum is nearest to even shares."""
    sums = np.concatenate([[0.0], np.cumsum(times)])
    cuts = [0]
    for stage in range(1, stages):
        nearest = int(np.abs(sums - sums[-1] * stage / stages).argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1), len(times) - stages + stage))
    return tuple(bitset(range(*ends)) for ends in pairwise([*cuts, len(times)]))


MAX_LOOKS = 2_000_000
"""While borders move: partitions times what one costs, in operators, actions and messages."""
MIN_GAIN = 1e-6
"""Share of the step by which a move of borders makes it shorter at least."""
MAX_FITTINGS = 24
"""Memory-limited searches, the most promising first."""


@dataclass(frozen=True)
class _Fit:
    """Stages to be cut for the memory limit."""

    area: Area
    schedule: str
    warm_up: tuple[int, ...]


_Item = Area | Candidates | _Fit


class Explorer:
    """Tries what could be best, in the order of what it could take at least.

    Args:
        counts: numbers of stages to try.
        check: called often; raises to end the search.
    """

    def __init__(
        self, problem: Problem, space: CutSpace, counts: Sequence[int], check: Check
    ) -> None:
        self.problem = problem
        self.judge = Judge(problem)
        self._check = check
        self._areas = Areas(problem, space, counts, check)
        self._cutter = Cutter(problem, space, check)
        self._queue: list[tuple[float, tuple[int, ...], int, _Item]] = []
        self._pushed = 0
        self._fits: set[_Fit] = set()
        self._fitted = 0
        self._hopeless: list[_Fit] = []
        self._memory_is_short = False
        self._complete: dict[Area, Candidates] = {}
        self._opened: list[Candidates] = []
        self._minima: set[Choice] = set()
        self._looks = MAX_LOOKS

    def run(self) -> None:
        """Find the best plan; what is found so far is with the judge at any time."""
        for area in self._areas.all:
            self._push(area.least_s, (area.stages, 0, 0, area.micro_batches), area)
        self._work()
        if self.judge.best() is None:
            self._fit_with_smaller_micro_batches()
        self._improve()

    def bound(self, stages: int, size: int, *, finished: bool) -> Bound:
        """What is proven about partitions into so many stages; quickly if time is up."""
        if finished:
            with suppress(OutOfTimeError):
                return self._areas.bound(stages, size)
        return self._areas.quick_bound(stages, size)

    def least_step_s(self) -> float:
        """No plan with the numbers of stages and micro-batch sizes that were tried takes less."""
        return min([*map(self._least_s, self._areas.known), self.judge.fastest_s])

    def alternatives(self, best: Verdict, most: int) -> list[Verdict]:
        """The next best plans of other shapes; most were not simulated because they are beaten."""
        options = [each for opened in self._opened for each in opened.best_of_orders()]
        known = self.judge.families()
        for candidate in sorted(options, key=lambda each: (each.bound_s, each.simplicity)):
            if len(known) > most:
                break
            if family_of(candidate) not in known and self.judge.may_fit(candidate):
                self.judge.examine(candidate)
                known = self.judge.families()
        return self.judge.alternatives(best, most)

    def _least_s(self, area: Area) -> float:
        """What was found if all candidates of an area were tried, or else its bound."""
        if area not in self._complete:
            return area.least_s
        candidates = self._complete[area]
        return min([candidates.next_s, *map(self.judge.least_s, candidates.taken)])

    def _push(self, bound_s: float, simplicity: tuple[int, ...], item: _Item) -> None:
        self._pushed += 1
        heappush(self._queue, (bound_s, simplicity, self._pushed, item))

    def _work(self) -> None:
        """Until nothing in the queue can be best."""
        while self._queue:
            bound_s, _, _, item = heappop(self._queue)
            self._check()
            if self.judge.is_beaten(bound_s):
                return
            self._turn(item)

    def _turn(self, item: _Item) -> None:
        if isinstance(item, Candidates):
            candidate = item.take()
            if self.judge.best() is None and not self.problem.has_limits:
                self.judge.judge(self._polished(candidate))
            if not self.judge.judge(candidate):
                self._push_fit(candidate)
            self._push_candidates(item)
        elif isinstance(item, Area):
            self._open(item)
        else:
            self._fit(item)

    def _open(self, area: Area) -> None:
        """From an area to its candidates."""
        if self._memory_is_short and not self._can_fit(area):
            return
        everything = self._areas.everything(area)
        layouts = self._proposals(area) if everything is None else everything
        found = self._candidates(layouts, area)
        self._opened.append(found)
        self._push_candidates(found)
        if everything is not None:
            self._complete[area] = found
        if not self._memory_is_short and not any(map(self.judge.may_fit, found)):
            self._memory_is_short = self.problem.has_limits

    def _can_fit(self, area: Area) -> bool:
        """Whether there are stages that fit with the fewest micro-batches in flight; if so, these
        are judged. Asked before other cuts are looked for, once these were seen not to fit."""
        fit = _Fit(area, *self._areas.orders(area.stages, area.size)[0])
        if fit in self._fits:
            return not self._is_hopeless(fit)
        self._fits.add(fit)
        self._fit(fit)
        return not self._is_hopeless(fit)

    def _proposals(self, area: Area) -> list[Layout]:
        return self._areas.layouts(self._areas.cuts(area.stages))

    def _candidates(self, layouts: Sequence[Layout], area: Area) -> Candidates:
        """Layouts of an area in every order."""
        orders = self._areas.orders(area.stages, area.size)
        return Candidates(self.problem, layouts, area.size, orders)

    def _push_candidates(self, candidates: Candidates) -> None:
        if candidates.next_s < inf:
            self._push(candidates.next_s, candidates.simplicity, candidates)

    def _push_fit(self, candidate: Candidate) -> None:
        choice = candidate.choice
        fit = _Fit(self._area_of(candidate), choice.schedule, choice.warm_up)
        if fit not in self._fits and self.problem.has_limits:
            self._fits.add(fit)
            self._push(fit.area.least_s, candidate.simplicity, fit)

    def _fit(self, fit: _Fit) -> None:
        """Cut anew, within the memory limit."""
        if self._fitted < MAX_FITTINGS and not self._is_hopeless(fit):
            if self._consider_fit(fit):
                self._fitted += 1
            else:
                self._hopeless.append(fit)

    def _is_hopeless(self, fit: _Fit) -> bool:
        """Whether less of everything found no stages that fit."""
        return any(
            other.area.stages == fit.area.stages
            and other.area.size <= fit.area.size
            and all(less <= more for less, more in zip(other.warm_up, fit.warm_up, strict=True))
            for other in self._hopeless
        )

    def _consider_fit(self, fit: _Fit) -> bool:
        """Judge the partitions that fit best, without and with recomputation; are there any?"""
        area, found = fit.area, False
        for mix in self._areas.mixes(area.stages):
            for recompute in self.problem.request.recompute_choices:
                wanted = plain_fit(self.problem, area.size, fit.warm_up, mix, recompute=recompute)
                cuts = self._cutter.balanced(wanted)
                found |= bool(cuts)
                layouts = self._areas.layouts(cuts)
                order = fit.schedule, fit.warm_up
                self.judge.consider(Candidates(self.problem, layouts, area.size, [order]))
        return found

    def _fit_with_smaller_micro_batches(self) -> None:
        """More micro-batches than speed asks for, down to single samples; most stages help most.

        Where stages fit, balance may need smaller ones still.
        """
        request = self.problem.request
        counts = [count for count in self._areas.counts if self.problem.could_hold(count)]
        for size in micro_batch_sizes(request, request.batch_size):
            fresh = [count for count in counts if size < min(self._areas.sizes(count))]
            for stages in reversed(fresh):
                area = self._areas.of(stages, size)
                if not self.judge.is_beaten(area.least_s):
                    depths = open_orders(request, stages, area.micro_batches)
                    self._consider_fit(_Fit(area, *depths[0]))

    def _improve(self) -> None:
        """Move borders of the best partition while that makes its simulated step shorter."""
        best = self.judge.best()
        if best is None or self._area_of(best.candidate) in self._complete:
            return
        if self.problem.has_limits:
            self.judge.consider(self._recut(self._area_of(best.candidate)))
        else:
            self.judge.judge(self._polished(best.candidate))
        while not self.judge.is_beaten(0.0):
            before = self.judge.best()
            if before is None or self._is_settled(before):
                return
            self.judge.consider(self._near(before.candidate))
            if self.judge.best() is before:
                return

    def _is_settled(self, best: Verdict) -> bool:
        """Whether no neighbour can be better, because the bounds are what is simulated."""
        candidate = best.candidate
        exact = best.step_s <= candidate.bound_s * (1 + MIN_GAIN)
        return exact and candidate.choice in self._minima

    def _polished(self, candidate: Candidate) -> Candidate:
        """The best by its bound that is found by cutting anew and by moving borders.

        Stages that are balanced at one micro-batch size need not be at another.
        """
        area = self._area_of(candidate)
        if area in self._complete or candidate.choice in self._minima:
            return candidate
        recut = self._recut(area)
        if recut.next_s < candidate.bound_s:
            candidate = recut.take()
        every = False
        while self._looks > 0:
            near = self._near(candidate, every=every)
            if near.next_s < candidate.bound_s * (1 - MIN_GAIN):
                candidate, every = near.take(), False
            elif every:
                self._minima.add(candidate.choice)
                break
            else:
                every = True
        return candidate

    def _recut(self, area: Area) -> Candidates:
        """Good cuts for the size of an area, if that is another than all are cut for first."""
        is_other = area.size != self._areas.reference_size
        cuts = self._areas.cuts(area.stages, area.size) if is_other else []
        return self._candidates(self._areas.layouts(cuts), area)

    def _near(self, candidate: Candidate, *, every: bool = False) -> Candidates:
        """The neighbours of a candidate, in every order; none once enough were looked at."""
        self._check()
        area = self._area_of(candidate)
        times = self.problem.block_times(area.size)
        found = neighbours(candidate.layout, self.problem.graph, times, every=every)
        look = len(self.problem.profile.operators) + 2 * area.micro_batches * area.stages
        near = list(islice(found, max(0, self._looks // look)))
        self._looks -= max(1, len(near)) * look
        return self._candidates(near, area)

    def _area_of(self, candidate: Candidate) -> Area:
        choice = candidate.choice
        return self._areas.of(len(choice.ranks), choice.size)
