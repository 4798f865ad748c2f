"""The judge: simulates the candidates that could be best."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pipectl.plan import Plan
from pipectl.planner.costs.peaks import least_peaks_bytes
from pipectl.planner.exploring.candidates import Candidate, Candidates, Simplicity
from pipectl.planner.judge import TIE
from pipectl.planner.partition.estimate import ROUNDING
from pipectl.planner.partition.plans import Choice, Ranks
from pipectl.planner.problem import Problem
from pipectl.simulate import Simulation, simulate

MOST_ACTIONS = 200_000
"""Simulated forwards and backwards in all; keeps planning for many ranks to seconds."""

Family = tuple[int, int, str, tuple[int, ...]]
"""Stages, micro-batch size, schedule and warm-up."""


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
        self._verdicts: list[Verdict] = []
        self._outcomes: dict[Choice, float] = {}
        self._actions = 0
        self.gave_up = False

    def consider(self, candidates: Candidates) -> list[Candidate]:
        """Judge the candidates that could be best and return those that do not fit."""
        unfit = []
        while candidates.next_s < inf and not self.is_beaten(candidates.next_s):
            candidate = candidates.take()
            if not self.judge(candidate):
                unfit.append(candidate)
        return unfit

    def judge(self, candidate: Candidate) -> bool:
        """False if the candidate does not fit; one that cannot be best is not simulated."""
        known = self._outcomes.get(candidate.choice)
        if known is not None:
            return known < inf
        if not self.may_fit(candidate):
            self._outcomes[candidate.choice] = inf
            return False
        if self.is_beaten(candidate.bound_s) or self._ties_at_best(candidate):
            return True
        return self.examine(candidate)

    def examine(self, candidate: Candidate) -> bool:
        """Simulate a candidate even if it cannot be best; whether it fits."""
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

    def alternatives(self, best: Verdict, most: int) -> list[Verdict]:
        """The next best that differ from the best, and from each other, in more than their cuts."""
        found = {family_of(best.candidate): best}
        for verdict in sorted(self._verdicts, key=lambda v: v.simulation.step_time_s):
            found.setdefault(family_of(verdict.candidate), verdict)
        return list(found.values())[1 : most + 1]

    def families(self) -> set[Family]:
        """Of all that was simulated and fits."""
        return {family_of(verdict.candidate) for verdict in self._verdicts}

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
        """Whether a candidate can at most tie, and is no simpler than what it would tie with."""
        best = self.best() if candidate.bound_s >= self.fastest_s * (1 - TIE) else None
        if best is None or candidate.simplicity < best.candidate.simplicity:
            return False
        equal = candidate.simplicity == best.candidate.simplicity
        return not equal or candidate.bound_s >= best.simulation.step_time_s * (1 - 2 * ROUNDING)

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether the parts of the memory that no schedule avoids are within the limits."""
        problem, choice = self._problem, candidate.choice
        if not problem.has_limits:
            return True
        table, shares = (
            problem.builder.table(choice.members, choice.size),
            problem.shares(choice.size),
        )
        peaks = least_peaks_bytes(table, choice.warm_up, shares, choice.recompute)
        return all(
            problem.baseline_bytes + peak <= problem.limit_bytes(rank)
            for peak, (rank,) in zip(peaks.tolist(), choice.ranks, strict=True)
        )

    def _simulate(self, plan: Plan) -> Simulation:
        """What the plan would take."""
        self._actions += 2 * plan.micro_batches * len(plan.stages)
        baseline = self._problem.baseline_bytes
        return simulate(plan, self._problem.cluster, process_baseline_bytes=baseline)


def _preference(verdict: Verdict) -> tuple[Simplicity, float, Ranks]:
    candidate = verdict.candidate
    return candidate.simplicity, verdict.simulation.step_time_s, candidate.choice.ranks


def family_of(candidate: Candidate) -> Family:
    """What tells plans apart that differ in more than their cuts."""
    choice = candidate.choice
    return len(choice.ranks), choice.size, choice.schedule, choice.warm_up
