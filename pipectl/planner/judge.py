"""The judge: bounds what a candidate can take, and simulates those that could be best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from pipectl.plan import Plan
from pipectl.planner.bounds import step_bound_s
from pipectl.planner.memory import least_peaks_bytes
from pipectl.planner.problem import Choice, Problem
from pipectl.simulate import Simulation, simulate

TIE = 1e-3
"""Step times that differ by less than this share are equal: the simplest of these plans wins."""
MOST_ACTIONS = 200_000
"""Simulated forwards and backwards in all; keeps planning for many ranks to seconds."""
Simplicity = tuple[int, int, int, int]


@dataclass(frozen=True)
class Candidate:
    """A choice and the least its step can take.

    Args:
        micro_batches: of a step.
    """

    choice: Choice
    micro_batches: int
    bound_s: float

    @property
    def simplicity(self) -> Simplicity:
        """Stages, recomputed stages, micro-batches in flight, micro-batches: fewer are better
        where times tie."""
        choice = self.choice
        again = sum(choice.recompute)
        return len(choice.placement), again, sum(choice.warm_up), self.micro_batches


@dataclass(frozen=True)
class Verdict:
    """A simulated candidate that fits."""

    candidate: Candidate
    plan: Plan
    simulation: Simulation


class Judge:
    """Collects the verdicts on the candidates of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._seen: set[Choice] = set()
        self._verdicts: list[Verdict] = []
        self._bounds: dict[object, float] = {}
        self._outcomes: dict[Choice, float] = {}
        self._actions = 0
        self.gave_up = False

    def candidates(self, choices: Iterable[Choice]) -> list[Candidate]:
        """Those that were not there before, the most promising first."""
        fresh = [choice for choice in dict.fromkeys(choices) if choice not in self._seen]
        self._seen.update(fresh)
        return sorted(map(self._candidate, fresh), key=lambda item: (item.bound_s, item.simplicity))

    def consider(self, choices: Iterable[Choice]) -> list[Candidate]:
        """Judge every new candidate and return those that do not fit."""
        return [candidate for candidate in self.candidates(choices) if not self.judge(candidate)]

    def judge(self, candidate: Candidate) -> bool:
        """False if the candidate does not fit; one that cannot be best is not simulated."""
        if not self._may_fit(candidate.choice):
            self._outcomes[candidate.choice] = inf
            return False
        if self.is_beaten(candidate.bound_s) or self._ties_at_best(candidate):
            return True
        plan = self._problem.plan(candidate.choice)
        simulation = self._simulate(plan)
        peaks = enumerate(simulation.peak_memory_bytes)
        fits = all(peak <= self._problem.limit_bytes(rank) for rank, peak in peaks)
        self._outcomes[candidate.choice] = simulation.step_time_s if fits else inf
        if fits:
            self._verdicts.append(Verdict(candidate, plan, simulation))
        return fits

    def best(self) -> Verdict | None:
        """The fastest plan that fits; among equals the simplest. None if there is none."""
        if not self._verdicts:
            return None
        ties = [v for v in self._verdicts if v.simulation.step_time_s <= self.fastest_s * (1 + TIE)]
        return min(ties, key=_preference)

    def alternatives(self, most: int) -> list[Verdict]:
        """The next best that differ from the best, and from each other, in more than their cuts."""
        best = self.best()
        found = {} if best is None else {_family(best): best}
        for verdict in sorted(self._verdicts, key=lambda v: v.simulation.step_time_s):
            found.setdefault(_family(verdict), verdict)
        return list(found.values())[1 : most + 1]

    def is_beaten(self, bound_s: float) -> bool:
        """Whether a plan that takes at least so long cannot even tie, or enough were simulated."""
        if bound_s > self.fastest_s * (1 + TIE):
            return True
        enough = self._actions > MOST_ACTIONS and bool(self._verdicts)
        self.gave_up |= enough
        return enough

    def least_s(self, candidate: Candidate) -> float:
        """The step of a candidate, or its bound if it was not simulated; infinite if it
        does not fit, and could not if its stages recomputed."""
        found = self._outcomes.get(candidate.choice, candidate.bound_s)
        helps = self._problem.request.recompute is None
        return candidate.bound_s if helps and found == inf else found

    @property
    def fastest_s(self) -> float:
        """The shortest step so far."""
        return min((v.simulation.step_time_s for v in self._verdicts), default=inf)

    def _ties_at_best(self, candidate: Candidate) -> bool:
        """Whether a candidate can at most tie, and is less simple than what it would tie with."""
        best = self.best() if candidate.bound_s >= self.fastest_s * (1 - TIE) else None
        return best is not None and candidate.simplicity > best.candidate.simplicity

    def _candidate(self, choice: Choice) -> Candidate:
        """Bounds do not depend on schedule and warm-up."""
        key = (choice.partition, choice.placement, choice.size, choice.recompute)
        if key not in self._bounds:
            self._bounds[key] = step_bound_s(
                self._problem.table(choice.partition, choice.size),
                choice.placement,
                self._problem.shares(choice.size),
                self._problem.cluster,
                choice.recompute,
            )
        micro_batches = self._problem.micro_batches(choice.size)
        return Candidate(choice, micro_batches, self._bounds[key])

    def _may_fit(self, choice: Choice) -> bool:
        """Whether the parts of the memory that no schedule avoids are within the limits."""
        problem = self._problem
        table, shares = problem.table(choice.partition, choice.size), problem.shares(choice.size)
        peaks = least_peaks_bytes(table, choice.warm_up, shares, choice.recompute)
        return all(
            problem.baseline_bytes + peak <= problem.limit_bytes(rank)
            for peak, rank in zip(peaks.tolist(), choice.placement, strict=True)
        )

    def _simulate(self, plan: Plan) -> Simulation:
        """What the plan would take."""
        self._actions += 2 * plan.micro_batches * len(plan.stages)
        baseline = self._problem.baseline_bytes
        return simulate(plan, self._problem.cluster, process_baseline_bytes=baseline)


def _preference(verdict: Verdict) -> tuple[Simplicity, float, tuple[int, ...]]:
    candidate = verdict.candidate
    return candidate.simplicity, verdict.simulation.step_time_s, candidate.choice.placement


def _family(verdict: Verdict) -> tuple[object, ...]:
    choice = verdict.candidate.choice
    return len(choice.placement), choice.size, choice.schedule, choice.warm_up
