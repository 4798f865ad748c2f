"""The queue of the search; see :mod:`pipectl.planner.search`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from math import inf

from pipectl.planner.areas import Area, Areas
from pipectl.planner.dynamic import Check
from pipectl.planner.fitting import Fitter, plain_fit
from pipectl.planner.judge import Candidate, Judge
from pipectl.planner.neighbours import neighbours
from pipectl.planner.partition import Bound, Space
from pipectl.planner.problem import Choice, Problem
from pipectl.planner.request import micro_batch_sizes, warm_ups

MOST_LOOKS = 400_000
"""At operators while borders move: partitions times operators."""
MOST_FITTINGS = 24
"""Memory-limited searches, the most promising first."""


@dataclass(frozen=True)
class _Fit:
    """Stages to be cut for the memory limit."""

    area: Area
    schedule: str
    warm_up: tuple[int, ...]


_Item = Area | Candidate | _Fit


class Explorer:
    """Tries what could be best, in the order of what it could take at least.

    Args:
        counts: numbers of stages to try.
        check: called often; raises to end the search.
    """

    def __init__(self, problem: Problem, space: Space, counts: Sequence[int], check: Check) -> None:
        self.problem = problem
        self.judge = Judge(problem)
        self._check = check
        self._areas = Areas(problem, space, counts, check)
        self._fitter = Fitter(problem, check)
        self._queue: list[tuple[float, tuple[int, ...], int, _Item]] = []
        self._pushed = 0
        self._fits: set[_Fit] = set()
        self._fitted = 0
        self._complete: dict[Area, list[Candidate]] = {}

    def run(self) -> None:
        """Find the best plan; what is found so far is with the judge at any time."""
        for area in self._areas.all:
            self._push(area.least_s, (area.stages, 0, 0, area.micro_batches), area)
        self._work()
        if self.judge.best() is None:
            self._fit_with_smaller_micro_batches()
        self._refine()
        self._improve()

    def bound(self, stages: int, size: int, *, finished: bool) -> Bound:
        """What is proven about partitions into so many stages; quickly if time is up."""
        return (self._areas.bound if finished else self._areas.quick_bound)(stages, size)

    def least_step_s(self) -> float:
        """No plan with the numbers of stages and micro-batch sizes that were tried takes less."""
        return min(min(map(self._least_s, self._areas.all)), self.judge.fastest_s)

    def _least_s(self, area: Area) -> float:
        """What was found if all candidates of an area were tried, or else its bound."""
        if area not in self._complete:
            return area.least_s
        return min(map(self.judge.least_s, self._complete[area]), default=inf)

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
        if isinstance(item, Candidate):
            if not self.judge.judge(item):
                self._push_fit(item)
        elif isinstance(item, Area):
            self._open(item)
        else:
            self._fit(item)

    def _open(self, area: Area) -> None:
        """From an area to its candidates."""
        everything = self._areas.everything(area)
        choices = everything if everything is not None else self._proposals(area)
        found = self.judge.candidates(choices)
        for candidate in found:
            self._push(candidate.bound_s, candidate.simplicity, candidate)
        if everything is not None:
            self._complete[area] = found

    def _proposals(self, area: Area) -> Iterator[Choice]:
        for cut in self._areas.cuts(area.stages):
            yield from self._areas.choices(cut, area.size)

    def _push_fit(self, candidate: Candidate) -> None:
        choice = candidate.choice
        area = self._areas.of(len(choice.placement), choice.size)
        fit = _Fit(area, choice.schedule, choice.warm_up)
        if fit not in self._fits and self.problem.has_limits:
            self._fits.add(fit)
            self._push(area.least_s, candidate.simplicity, fit)

    def _fit(self, fit: _Fit) -> None:
        """Cut anew, within the memory limit."""
        if self._fitted < MOST_FITTINGS:
            self._fitted += 1
            self._consider_fit(fit)

    def _consider_fit(self, fit: _Fit) -> None:
        """Judge the partitions that fit best, without and with recomputation."""
        area = fit.area
        for mix in self._areas.mixes(area.stages):
            for recompute in self.problem.request.recompute_choices:
                wanted = plain_fit(self.problem, area.size, fit.warm_up, mix, recompute=recompute)
                cuts = self._fitter.balanced(wanted)
                self.judge.consider(
                    choice
                    for cut in cuts
                    for choice in self._areas.choices(cut, area.size)
                    if (choice.schedule, choice.warm_up) == (fit.schedule, fit.warm_up)
                )

    def _fit_with_smaller_micro_batches(self) -> None:
        """More micro-batches than speed asks for, down to single samples; most stages help most."""
        request = self.problem.request
        known = {area.size for area in self._areas.all if area.stages == self._areas.counts[-1]}
        for size in micro_batch_sizes(request, request.batch_size):
            for stages in reversed(self._areas.counts) if size < min(known) else ():
                depths = warm_ups(request, stages, self.problem.micro_batches(size))
                self._consider_fit(_Fit(self._areas.of(stages, size), *depths[0]))
            if self.judge.best() is not None:
                return

    def _refine(self) -> None:
        """Stages that are balanced at one size need not be at another."""
        best = self.judge.best()
        if best is None:
            return
        choice = best.candidate.choice
        if choice.size != self._areas.reference_size:
            for cut in self._areas.cuts(len(choice.placement), choice.size):
                self.judge.consider(self._areas.choices(cut, choice.size))

    def _improve(self) -> None:
        """Move the borders of the best partition while that makes the step shorter."""
        best = self.judge.best()
        left = MOST_LOOKS // len(self.problem.profile.operators)
        while best is not None and left > 0 and not self.judge.is_beaten(0.0):
            choice, before = best.candidate.choice, best
            times = self.problem.block_times(choice.size)
            near = list(islice(neighbours(choice, self.problem.graph, times), left))
            left -= len(near)
            self._check()
            self.judge.consider(other for one in near for other in self._areas.orders(one))
            best = self.judge.best()
            if best is before:
                return
