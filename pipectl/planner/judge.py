"""The evaluation of plans: simulated, held against the memory of every rank, and compared.

Every plan that the planner returns is simulated here. Of plans that fit, the fastest is best. The
search for plain plans counts steps that differ by less than ``TIE`` as equal, and takes the
simplest; a plan derived from plain plans must be faster by this share to replace the best of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from pipectl.cluster import Cluster
from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.costs.footprint import baseline_bytes
from pipectl.planner.partition.estimate import ROUNDING
from pipectl.planner.partition.layout import Choice, Layout, Ranks
from pipectl.planner.problem import Problem
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile
from pipectl.simulate import simulate

TIE = 1e-3
"""Step times that differ by less than this share count as equal."""
MAX_ACTIONS = 1_000_000
"""Total of simulated forwards and backwards, over all replicas, per group of derived plans."""
MAX_ACTIONS_OF_SEARCH = 200_000
"""Total of simulated forwards and backwards; keeps planning for many ranks within seconds."""
Simplicity = tuple[int, int, int, int]
"""Numbers of stages, recomputed stages, micro-batches in flight, and micro-batches. Lower is better
if times tie."""
Family = tuple[tuple[int, ...], int, str, tuple[int, ...]]
"""Replicas of every stage, micro-batch size, schedule and warm-up."""


def predicted(plan: Plan, cluster: Cluster, profile: Profile) -> Plan:
    """A plan with the prediction of the simulator.

    Args:
        profile: has the memory of a process besides its stages.
    """
    simulation = simulate(
        plan,
        cluster,
        process_baseline_bytes=baseline_bytes(profile),
        capture_bytes=profile.capture_bytes,
        heap_share=profile.heap_share,
    )
    return replace(plan, prediction=simulation.prediction)


def plan_of_stages(
    profile: Profile, cluster: Cluster, request: PlanRequest, stages: Sequence[Sequence[str]]
) -> Plan:
    """The plan, with its prediction, that runs each stage on the rank of its number.

    Args:
        cluster: with at least as many ranks as there are stages.
        request: if it has no micro-batches, they have the profile's size.
        stages: ids of the operators of each, in the order of the pipeline.
    """
    plan = Problem(profile, cluster, request).stages_in_turn(stages)
    return predicted(plan, cluster, profile)


def out_of_time() -> OutOfTimeError:
    """The error for no plan in time."""
    return OutOfTimeError("planning was ended before any plan was found", cure="allow more time")


class Evaluator:
    """Simulates plans of a problem, within its limits of memory.

    Args:
        expired: called repeatedly; once it returns true, no more plans are tried.
        max_actions: total of simulated forwards and backwards, over all replicas.

    Attributes:
        sizes: micro-batch sizes of the simulated plans.
    """

    def __init__(
        self,
        problem: Problem,
        expired: Callable[[], bool] = lambda: False,
        *,
        max_actions: int = MAX_ACTIONS,
    ) -> None:
        self.problem = problem
        self._expired = expired
        self._max_actions = max_actions
        self._actions = 0
        self.sizes: set[int] = set()

    @property
    def is_exhausted(self) -> bool:
        """Whether no more plans should be tried if there is one."""
        return self._actions > self._max_actions or self._expired()

    def allow(self, max_actions: int) -> None:
        """Set how many more actions may be simulated from now on."""
        self._max_actions = self._actions + max_actions

    def extend(self, max_actions: int) -> None:
        """Raise the limit on simulated actions."""
        self._max_actions += max_actions

    def run(self, plan: Plan) -> Plan:
        """Simulate a plan; returns it with its prediction."""
        self._actions += 2 * plan.micro_batches * sum(stage.replicas for stage in plan.stages)
        self.sizes.add(plan.micro_batch_size)
        return predicted(plan, self.problem.cluster, self.problem.profile)

    def fits(self, tried: Plan) -> bool:
        """Whether every rank of a simulated plan stays within its limit."""
        return self.problem.excess_bytes(tried) <= 0

    def stage_fits(self, tried: Plan, stage: int) -> bool:
        """Whether the ranks of a stage of a simulated plan stay within their limits."""
        assert tried.prediction is not None
        own, peaks = tried.stages[stage], tried.prediction.peak_memory_bytes
        ranks = (*own.ranks, *own.backward_ranks)
        return all(peaks[rank] <= self.problem.limit_bytes(rank) for rank in ranks)


def preference(plan: Plan) -> tuple[float, int, int, int]:
    """Lower is better: the predicted step, then the simpler plan."""
    return plan.predicted_step_s, len(plan.stages), sum(plan.warm_up), plan.micro_batches


@dataclass(frozen=True)
class Candidate:
    """A choice and the estimate of its step, a lower bound with one rank per stage.

    Args:
        micro_batches: of a step.
        may_fit: whether the memory that every schedule needs is within the limits.
    """

    choice: Choice
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
        self.fastest_s = inf
        self.gave_up = False

    def judge(self, candidate: Candidate) -> Outcome:
        """Simulate a candidate, unless it does not fit or cannot be best."""
        if candidate.choice not in self._steps_s:
            if not candidate.may_fit:
                self._steps_s[candidate.choice] = inf
            elif self.is_beaten(candidate.estimate_s) or self._ties_at_best(candidate):
                return Outcome.BEATEN
        return self.examine(candidate)

    def examine(
        self, candidate: Candidate, change_modes: Callable[[Plan], Plan | None] = lambda _: None
    ) -> Outcome:
        """Simulate a candidate even if it cannot be best.

        Args:
            change_modes: makes a plan fit that does not, but could be the best; or returns None.
        """
        choice = candidate.choice
        if choice not in self._steps_s:
            plan = self.evaluator.run(self._problem.plan(choice))
            fitting = plan if self.evaluator.fits(plan) else None
            if fitting is None and plan.predicted_step_s < self.fastest_s:
                fitting = change_modes(plan)
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
        return min(ties, key=_simplest_first)

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


def _simplest_first(verdict: Verdict) -> tuple[Simplicity, float, Ranks]:
    candidate = verdict.candidate
    return candidate.simplicity, verdict.step_s, candidate.choice.layout.ranks
