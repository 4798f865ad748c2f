"""The judge: simulates candidates in the order of their lower bounds until none can be better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from pipectl.plan import Plan
from pipectl.planner.bounds import step_bound_s
from pipectl.planner.memory import peak_bytes
from pipectl.planner.problem import Choice, Problem
from pipectl.simulate import Simulation, simulate

TIE = 1e-3
"""Step times that differ by less than this share are equal: the simplest of these plans wins."""
MOST_ACTIONS = 200_000
"""Simulated forwards and backwards in all; keeps planning for many ranks to seconds."""


@dataclass(frozen=True)
class Candidate:
    """A choice, its plan and the least its step can take."""

    choice: Choice
    plan: Plan
    bound_s: float

    @property
    def simplicity(self) -> tuple[int, int, int]:
        """Stages, micro-batches in flight, micro-batches: fewer are better where times tie."""
        plan = self.plan
        return len(plan.stages), sum(plan.warm_up), plan.micro_batches


@dataclass(frozen=True)
class Verdict:
    """A simulated candidate that fits."""

    candidate: Candidate
    simulation: Simulation


class Judge:
    """Collects the verdicts on the candidates of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._seen: set[Choice] = set()
        self._verdicts: list[Verdict] = []
        self._actions = 0

    def consider(self, choices: Iterable[Choice]) -> list[Candidate]:
        """Simulate whatever could be best and returns the candidates that do not fit."""
        fresh = [choice for choice in dict.fromkeys(choices) if choice not in self._seen]
        self._seen.update(fresh)
        candidates = sorted(
            map(self._candidate, fresh), key=lambda item: (item.bound_s, *item.simplicity)
        )
        return [candidate for candidate in candidates if not self._judge(candidate)]

    def best(self) -> Verdict | None:
        """The fastest plan that fits; among equals the simplest. None if there is none."""
        if not self._verdicts:
            return None
        ties = [v for v in self._verdicts if v.simulation.step_time_s <= self._fastest * (1 + TIE)]
        return min(ties, key=lambda v: (*v.candidate.simplicity, v.simulation.step_time_s))

    def is_beaten(self, bound_s: float) -> bool:
        """Whether a plan that takes at least so long cannot even tie, or time is up."""
        beaten = bound_s > self._fastest * (1 + TIE)
        return beaten or (self._actions > MOST_ACTIONS and bool(self._verdicts))

    def may_fit(self, plan: Plan) -> bool:
        """Whether the parts of the memory that no schedule avoids are within the limits."""
        baseline = self._problem.baseline_bytes
        return all(
            peak_bytes(plan, index, baseline) <= self._problem.limit_bytes(stage.ranks[0])
            for index, stage in enumerate(plan.stages)
        )

    def simulate(self, plan: Plan) -> Simulation:
        """What the plan would take."""
        self._actions += 2 * plan.micro_batches * len(plan.stages)
        baseline = self._problem.baseline_bytes
        return simulate(plan, self._problem.cluster, process_baseline_bytes=baseline)

    def _ties_at_best(self, candidate: Candidate) -> bool:
        """Whether a candidate can at most tie, and is less simple than what it would tie with."""
        best = self.best() if candidate.bound_s >= self._fastest * (1 - TIE) else None
        return best is not None and candidate.simplicity > best.candidate.simplicity

    @property
    def _fastest(self) -> float:
        return min((v.simulation.step_time_s for v in self._verdicts), default=inf)

    def _candidate(self, choice: Choice) -> Candidate:
        plan = self._problem.plan(choice)
        return Candidate(choice, plan, step_bound_s(plan, self._problem.cluster))

    def _judge(self, candidate: Candidate) -> bool:
        """False if the candidate does not fit; one that cannot be best is not simulated."""
        if not self.may_fit(candidate.plan):
            return False
        if self.is_beaten(candidate.bound_s) or self._ties_at_best(candidate):
            return True
        simulation = self.simulate(candidate.plan)
        peaks = enumerate(simulation.peak_memory_bytes)
        fits = all(peak <= self._problem.limit_bytes(rank) for rank, peak in peaks)
        if fits:
            self._verdicts.append(Verdict(candidate, simulation))
        return fits
