"""The judge: simulates what the searches propose, and keeps the plans that fit.

Every plan that the planner returns is simulated here. Searches for cuts propose *candidates*, with
an estimate of the step; those that derive plans from others propose *plans*. Steps that differ by
less than ``TIE`` count as equal: then the simplest plan is best, and plans without offload, without
backwards on other ranks and in the order of 1F1B or GPipe are simpler than others. Some plans have
to be faster than all others by more than a tie, because predictions are not exact: their *gain*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import inf

from pipectl.plan import Plan
from pipectl.planner.bounds import least_step_s
from pipectl.planner.candidates import Candidate, Candidates, Family
from pipectl.planner.evaluator import TIE, Evaluator
from pipectl.planner.modes import ModeSearch
from pipectl.planner.partition.estimate import ROUNDING
from pipectl.planner.partition.layout import Choice
from pipectl.planner.plans import plan_of
from pipectl.planner.problem import Problem
from pipectl.planner.request import OTHER_SCHEDULES, Expired

MAX_ACTIONS_OF_SEARCH = 200_000
"""Total of simulated forwards and backwards; keeps planning for many ranks within seconds."""


class Outcome(Enum):
    """What became of a candidate; one that cannot be best is not simulated."""

    FITS, DOES_NOT_FIT, BEATEN = range(3)


@dataclass(frozen=True)
class Verdict:
    """A simulated plan that fits.

    Args:
        candidate: that it was made from; None if it was proposed as a plan.
    """

    plan: Plan
    candidate: Candidate | None = None

    @property
    def step_s(self) -> float:
        """Simulated time of the step."""
        return self.plan.predicted_step_s


class Judge:
    """Collects the plans of one problem that fit.

    Plans come in by one of these methods; the first three take candidates:

        judge, judge_all      Explorer, Improver    those that may fit, and could be best or tie
        examine               Explorer              all, even if they cannot be best
        consider              searches of variants  plans that fit, in other modes if need be
        consider_simulated    named_plan            the same, of plans that are simulated already
        add                   VariantSearch         simulated plans that fit, as the request asks

    Args:
        expired: called repeatedly; once it returns true, no more plans are tried.
        offload: the allowed values of whether stages offload.
        accepts: whether a plan meets the request.
        max_actions: total of simulated forwards and backwards, over all replicas.

    Attributes:
        evaluator: simulates the plans.
        fastest_s: the shortest step so far.
        closest: of all simulated proposals, before their modes were changed to fit, the one that
            exceeds its limits least.
        finished: whether no proposals were left out because of the limit on simulations.
    """

    def __init__(
        self,
        problem: Problem,
        expired: Expired = lambda: False,
        *,
        offload: tuple[bool, ...] = (False,),
        accepts: Callable[[Plan], bool] = lambda _: True,
        max_actions: int = MAX_ACTIONS_OF_SEARCH,
    ) -> None:
        self.evaluator = Evaluator(problem, expired, max_actions=max_actions)
        self.fastest_s = inf
        self.closest: Plan | None = None
        self.finished = True
        self._problem = problem
        self._accepts = accepts
        self._offload = offload
        self._verdicts: list[Verdict] = []
        self._steps_s: dict[Choice, float] = {}  # infinite if it does not fit
        self._plain_s = inf  # the shortest step of plans without a required gain

    @cached_property
    def _modes(self) -> ModeSearch:
        return ModeSearch(self.evaluator, self._offload)

    @property
    def plans(self) -> list[Plan]:
        """All plans that fit, in the order in which they were accepted."""
        return [verdict.plan for verdict in self._verdicts]

    def judge(self, candidate: Candidate) -> Outcome:
        """Simulate a candidate, unless it does not fit or cannot be best."""
        if candidate.choice not in self._steps_s:
            if not candidate.may_fit:
                self._steps_s[candidate.choice] = inf
            elif self.is_beaten(candidate.estimate_s) or self._ties_at_best(candidate):
                return Outcome.BEATEN
        return self.examine(candidate)

    def judge_all(self, candidates: Candidates) -> set[Outcome]:
        """Judge the candidates that could be best; what became of all."""
        outcomes = {Outcome.DOES_NOT_FIT} if candidates.some_left_out else set()
        while candidates.next_s < inf:
            if self.is_beaten(candidates.next_s):
                return outcomes | {Outcome.BEATEN}
            outcomes.add(self.judge(candidates.take()))
        return outcomes

    def examine(self, candidate: Candidate, *, change_modes: bool = False) -> Outcome:
        """Simulate a candidate even if it cannot be best.

        Args:
            change_modes: whether to look for modes in which it fits, if it could be the best.
        """
        choice = candidate.choice
        if choice not in self._steps_s:
            plan = self.evaluator.run(plan_of(self._problem, choice))
            fitting = plan if self._problem.fits(plan) else None
            if fitting is None and change_modes and plan.predicted_step_s < self.fastest_s:
                fitting = self._modes.within_memory(plan)
            self._steps_s[choice] = inf if fitting is None else fitting.predicted_step_s
            if fitting is not None:
                self._keep(Verdict(fitting, candidate))
        return Outcome.FITS if self._steps_s[choice] < inf else Outcome.DOES_NOT_FIT

    def add(self, plans: Iterable[Plan]) -> None:
        """Keep plans that fit, with predictions, if they meet the request."""
        for plan in filter(self._accepts, plans):
            self._plain_s = min(self._plain_s, plan.predicted_step_s)
            self._keep(Verdict(plan))

    def consider(self, proposed: Iterable[Plan], gain: float = TIE) -> None:
        """Keep plans that fit, or that could be the fastest and fit in other modes.

        Args:
            proposed: without predictions.
            gain: share by which their steps must be shorter than those of all plans kept without a
                required gain (of all plans, if there are no such plans). If it is more than a tie,
                only a new fastest plan is kept.
        """
        limit_s = self._limit_s(gain)
        simulated: list[Plan] = []
        bounded: Iterable[tuple[float, Plan]]
        bounded = ((least_step_s(plan, self._problem.cluster), plan) for plan in proposed)
        if gain > TIE:  # at most the fastest is kept: the most promising come first
            bounded = sorted(bounded, key=lambda pair: pair[0])
        for least_s, plan in bounded:
            if self.evaluator.is_exhausted and (self._verdicts or simulated):
                self.finished = False
                break
            if least_s < limit_s:
                tried = self._modes.simplest(plan)
                simulated.append(tried)
                excess, closest = self._problem.excess_bytes, self.closest
                if closest is None or excess(tried) < excess(closest):
                    self.closest = tried
                if gain > TIE and self._problem.fits(tried) and self._accepts(tried):
                    limit_s = min(limit_s, tried.predicted_step_s)
        self.consider_simulated(simulated, gain)

    def consider_simulated(self, simulated: Iterable[Plan], gain: float = TIE) -> None:
        """As :meth:`consider`, for plans with predictions."""
        for plan in sorted(simulated, key=_by_step):
            limit_s = self._limit_s(gain)
            fitting: Plan | None = plan if self._problem.fits(plan) else None
            if plan.predicted_step_s < limit_s and not self.gives_up():
                fitting = self._modes.within_memory(plan)
            if fitting is None:
                continue
            if gain == TIE:
                self.add([fitting])
            elif fitting.predicted_step_s < limit_s and self._accepts(fitting):
                self._keep(Verdict(fitting))

    def best(self) -> Verdict | None:
        """The fastest plan; among equals the simplest. None if there is none."""
        if not self._verdicts:
            return None
        ties = [v for v in self._verdicts if v.step_s <= self.fastest_s * (1 + TIE)]
        return min(ties, key=lambda verdict: _simplest_first(verdict.plan))

    def families(self) -> set[Family]:
        """Families of all candidates that fit."""
        candidates = (verdict.candidate for verdict in self._verdicts)
        return {candidate.family for candidate in candidates if candidate is not None}

    def is_beaten(self, estimate_s: float) -> bool:
        """Whether a plan with this estimate cannot even tie, or :meth:`gives_up`."""
        return estimate_s > self.fastest_s * (1 + TIE) or self.gives_up()

    def gives_up(self) -> bool:
        """Whether enough were simulated, and some fit: what comes next is left out, and
        :attr:`finished` becomes false."""
        exhausted = bool(self._verdicts) and self.evaluator.is_exhausted
        self.finished &= not exhausted
        return exhausted

    def least_s(self, candidate: Candidate) -> float:
        """The step of a candidate, or its estimate if it was not simulated; infinite if it does not
        fit, even with recomputation."""
        step_s = self._steps_s.get(candidate.choice, candidate.estimate_s)
        helps = self._problem.request.recompute is None
        return candidate.estimate_s if helps and step_s == inf else step_s

    def _keep(self, verdict: Verdict) -> None:
        self._verdicts.append(verdict)
        self.fastest_s = min(self.fastest_s, verdict.step_s)

    def _limit_s(self, gain: float) -> float:
        """The step time that a plan must be below to be the fastest, with a gain if required."""
        if gain == TIE or self._plain_s == inf:
            return self.fastest_s * (1 - gain)
        return min(self.fastest_s * (1 - TIE), self._plain_s * (1 - gain))

    def _ties_at_best(self, candidate: Candidate) -> bool:
        """Whether a candidate can at most tie, with plans that are as simple or simpler."""
        best = self.best() if candidate.estimate_s >= self.fastest_s * (1 - TIE) else None
        if best is None or best.candidate is None:
            return False
        if candidate.simplicity < best.candidate.simplicity:
            return False
        equal = candidate.simplicity == best.candidate.simplicity
        return not equal or candidate.estimate_s >= best.step_s * (1 - 2 * ROUNDING)


def best_first(plans: Sequence[Plan]) -> list[Plan]:
    """Plans with predictions: the best, then the fastest of every other shape."""
    if not plans:
        return []
    most_s = min(plan.predicted_step_s for plan in plans) * (1 + TIE)
    ties = [plan for plan in plans if plan.predicted_step_s <= most_s]
    shapes: dict[object, Plan] = {}
    for plan in [min(ties, key=_simplest_first), *sorted(plans, key=_by_step)]:
        shapes.setdefault(_shape(plan), plan)
    return list(shapes.values())


def _by_step(plan: Plan) -> tuple[float, int, int, int]:
    return plan.predicted_step_s, len(plan.stages), sum(plan.warm_up), plan.micro_batches


def _simplest_first(plan: Plan) -> tuple[object, ...]:
    stages = plan.stages
    varied = any(stage.offload or stage.segments or stage.backward_ranks for stage in stages)
    return (
        varied or plan.schedule in OTHER_SCHEDULES,
        len(stages),
        sum(stage.recompute for stage in stages),
        sum(plan.warm_up),
        plan.micro_batches,
        plan.predicted_step_s,
        tuple(stage.ranks for stage in stages),
    )


def _shape(plan: Plan) -> object:
    """Equal for plans that differ only in their cuts and ranks."""
    stages = tuple(
        (
            *(stage.replicas, bool(stage.backward_ranks), stage.recompute, stage.offload),
            stage.segments is not None,
        )
        for stage in plan.stages
    )
    return stages, plan.schedule, plan.warm_up, plan.micro_batches, plan.replication
