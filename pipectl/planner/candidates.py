"""Candidate layouts in the order of their estimates, and the simulation of the best.

There may be many thousands of candidates per number of stages and micro-batch size, and few are
simulated. Their estimates are computed together, and they are taken in ascending order of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

import numpy as np

from pipectl.plan import Plan
from pipectl.planner.evaluate import TIE, Evaluator
from pipectl.planner.modes import ModeSearch
from pipectl.planner.partition.estimate import ROUNDING
from pipectl.planner.partition.layout import Choice, Layout, Ranks
from pipectl.planner.problem import Problem
from pipectl.planner.request import Order, open_orders

OVERFULL = 1.5
"""Factor, plus the relative excess, of the estimates of candidates with replicas whose ranks exceed
their memory limit."""
Simplicity = tuple[int, int, int, int]
"""Numbers of stages, recomputed stages, micro-batches in flight, and micro-batches. Lower is better
if times tie."""
Family = tuple[tuple[int, ...], int, str, tuple[int, ...]]
"""Replicas of every stage, micro-batch size, schedule and warm-up."""


@dataclass(frozen=True)
class Candidate:
    """A choice and the estimate of its step, a lower bound with one rank per stage.

    Args:
        size: samples of a micro-batch in the estimate; replicas that take whole micro-batches may
            have smaller ones.
        micro_batches: of a step.
        may_fit: whether the memory that every schedule needs is within the limits.
    """

    choice: Choice
    size: int
    micro_batches: int
    estimate_s: float
    may_fit: bool = True

    @property
    def layout(self) -> Layout:
        """Stages and their ranks."""
        return self.choice.layout

    @property
    def simplicity(self) -> Simplicity:
        """Key by which candidates are preferred if times tie."""
        choice = self.choice
        recomputed = sum(choice.layout.recompute)
        return len(choice.layout.ranks), recomputed, sum(choice.warm_up), self.micro_batches

    @property
    def family(self) -> Family:
        """Key that is equal for candidates that differ only in their cuts."""
        choice = self.choice
        return choice.replicas, choice.size, choice.schedule, choice.warm_up


class Candidates:
    """Every layout in every order, by estimate and then by simplicity.

    Args:
        orders: by default all open orders for the stages of each layout.
        with_replicas: whether stages may have replicas. If so, only the two orders with the fewest
            micro-batches in flight are tried, and :data:`OVERFULL` applies.

    Attributes:
        taken: candidates taken so far.
    """

    def __init__(
        self,
        problem: Problem,
        layouts: Sequence[Layout],
        size: int,
        orders: Sequence[Order] | None = None,
        *,
        with_replicas: bool = False,
    ) -> None:
        self._problem = problem
        self._layouts = list(dict.fromkeys(layouts))
        self._size = size
        self._orders: list[Order] = []
        self.taken: list[Candidate] = []
        by_stages: dict[int, list[int]] = {}
        for place, layout in enumerate(self._layouts):
            by_stages.setdefault(len(layout.partition), []).append(place)
        columns = []  # place, order, recomputed stages, micro-batches in flight, estimate
        for stages, places in by_stages.items():
            fresh = orders or open_orders(problem.request, stages, problem.micro_batches(size))
            fresh = fresh[:2] if with_replicas else fresh
            numbers = np.arange(len(self._orders), len(self._orders) + len(fresh))
            self._orders += fresh
            chosen, warm_ups = [self._layouts[place] for place in places], [w for _, w in fresh]
            steps_s = problem.estimator.steps_s(chosen, size, warm_ups)
            excess = problem.estimator.excess(chosen, size, warm_ups)
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
        return Candidate(choice, self._size, count, estimate_s, may_fit)


MAX_ACTIONS_OF_SEARCH = 200_000
"""Total of simulated forwards and backwards; keeps planning for many ranks within seconds."""


class Outcome(Enum):
    """What became of a candidate; one that cannot be best is not simulated."""

    FITS, DOES_NOT_FIT, BEATEN = range(3)


@dataclass(frozen=True)
class Verdict:
    """A simulated candidate that fits."""

    candidate: Candidate
    plan: Plan

    @property
    def step_s(self) -> float:
        """Simulated time of the step."""
        return self.plan.predicted_step_s


class Judge:
    """Collects the verdicts on the candidates of one problem.

    Attributes:
        evaluator: simulates the plans.
        fastest_s: the shortest step so far.
        gave_up: whether candidates were left out because of the limit on simulations.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._verdicts: list[Verdict] = []
        self._steps_s: dict[Choice, float] = {}  # infinite if it does not fit
        self.evaluator = Evaluator(problem, max_actions=MAX_ACTIONS_OF_SEARCH)
        self._modes = ModeSearch(self.evaluator, (False,))
        self.fastest_s = inf
        self.gave_up = False

    def consider(self, candidates: Candidates) -> None:
        """Judge the candidates that could be best."""
        while candidates.next_s < inf and not self.is_beaten(candidates.next_s):
            self.judge(candidates.take())

    def judge(self, candidate: Candidate) -> Outcome:
        """Simulate a candidate, unless it does not fit or cannot be best."""
        if candidate.choice not in self._steps_s:
            if not candidate.may_fit:
                self._steps_s[candidate.choice] = inf
            elif self.is_beaten(candidate.estimate_s) or self._ties_at_best(candidate):
                return Outcome.BEATEN
        return self.examine(candidate)

    def examine(self, candidate: Candidate) -> Outcome:
        """Simulate a candidate even if it cannot be best.

        Stages with replicas that do not fit recompute if they may and if that could be faster than
        the best plan so far.
        """
        choice = candidate.choice
        if choice not in self._steps_s:
            plan = self.evaluator.run(self._problem.plan(choice))
            fitting = plan if self.evaluator.fits(plan) else None
            could_be_best = plan.predicted_step_s < self.fastest_s
            if fitting is None and max(choice.replicas) > 1 and could_be_best:
                fitting = self._modes.within_memory(plan)
            self._steps_s[choice] = inf if fitting is None else fitting.predicted_step_s
            if fitting is not None:
                self._verdicts.append(Verdict(candidate, fitting))
                self.fastest_s = min(self.fastest_s, fitting.predicted_step_s)
        return Outcome.FITS if self._steps_s[choice] < inf else Outcome.DOES_NOT_FIT

    def best(self) -> Verdict | None:
        """The fastest plan that fits; among equals the simplest. None if there is none."""
        if not self._verdicts:
            return None
        ties = [v for v in self._verdicts if v.step_s <= self.fastest_s * (1 + TIE)]
        return min(ties, key=_preference)

    def alternatives(self, best: Verdict, most: int) -> list[Verdict]:
        """The next best plans, all of which differ in more than their cuts."""
        shapes = {best.candidate.family: best}
        for verdict in sorted(self._verdicts, key=lambda v: v.step_s):
            shapes.setdefault(verdict.candidate.family, verdict)
        return list(shapes.values())[1 : most + 1]

    def families(self) -> set[Family]:
        """Families of all simulated plans that fit."""
        return {verdict.candidate.family for verdict in self._verdicts}

    def is_beaten(self, estimate_s: float) -> bool:
        """Whether a plan with this estimate cannot even tie, or simulations are exhausted."""
        return estimate_s > self.fastest_s * (1 + TIE) or self.is_exhausted()

    def is_exhausted(self) -> bool:
        """Whether enough were simulated, and some fit; what is left out then is given up."""
        exhausted = self.evaluator.is_exhausted and bool(self._verdicts)
        self.gave_up |= exhausted
        return exhausted

    def least_s(self, candidate: Candidate) -> float:
        """The step of a candidate, or its estimate if it was not simulated; infinite if it does not
        fit, even with recomputation."""
        step_s = self._steps_s.get(candidate.choice, candidate.estimate_s)
        helps = self._problem.request.recompute is None
        return candidate.estimate_s if helps and step_s == inf else step_s

    def _ties_at_best(self, candidate: Candidate) -> bool:
        """Whether a candidate can at most tie, with plans that are as simple or simpler."""
        best = self.best() if candidate.estimate_s >= self.fastest_s * (1 - TIE) else None
        if best is None or candidate.simplicity < best.candidate.simplicity:
            return False
        equal = candidate.simplicity == best.candidate.simplicity
        return not equal or candidate.estimate_s >= best.step_s * (1 - 2 * ROUNDING)


def _preference(verdict: Verdict) -> tuple[Simplicity, float, Ranks]:
    candidate = verdict.candidate
    return candidate.simplicity, verdict.step_s, candidate.choice.layout.ranks
