"""Plans on trial: simulated, held against the memory of every rank, and compared.

Every plan that the planner returns was simulated here. Of plans that fit, the fastest is best;
those whose steps differ by less than ``TIE`` are equal, and the simplest of them wins.

Candidates of one number of stages and micro-batch size can be many thousands, and few of them are
ever looked at: their estimates are computed together, and they come by their estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from pipectl.cluster import Cluster
from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan, Search, Stage
from pipectl.planner.assumptions import baseline_bytes
from pipectl.planner.costs.stage_costs import least_peaks_bytes
from pipectl.planner.partition.cutter import Bound
from pipectl.planner.partition.estimate import ROUNDING
from pipectl.planner.partition.layout import Choice, Layout, Ranks
from pipectl.planner.problem import Problem
from pipectl.planner.request import Order, PlanRequest
from pipectl.profile import Profile
from pipectl.simulate import simulate

TIE = 1e-3
"""Step times that differ by less than this share are equal: the simplest of these plans wins."""
MAX_ACTIONS = 1_000_000
"""Simulated forwards and backwards of all replicas in all."""


def predicted(plan: Plan, cluster: Cluster, baseline_bytes: int) -> Plan:
    """A plan with what the simulator says of it.

    Args:
        baseline_bytes: of a process without a stage.
    """
    found = simulate(plan, cluster, process_baseline_bytes=baseline_bytes)
    return replace(plan, prediction=found.prediction)


def plan_of_stages(
    profile: Profile, cluster: Cluster, request: PlanRequest, stages: Sequence[Sequence[str]]
) -> Plan:
    """The plan, with its prediction, that runs each stage on the rank of its number.

    Args:
        cluster: with at least as many ranks as there are stages.
        request: without micro-batches, those of the profile's size are taken.
        stages: ids of the operators of each, in the order of the pipeline.
    """
    plan = Problem(profile, cluster, request).stages_in_turn(stages)
    return predicted(plan, cluster, baseline_bytes(profile))


def out_of_time() -> OutOfTimeError:
    """The error to raise when time was over before there was any plan."""
    return OutOfTimeError("planning was ended before any plan was found", cure="allow more time")


class Trials:
    """Simulates plans of a problem, within its limits of memory.

    Args:
        expired: asked now and then; once it is true, no more is tried.
        max_actions: to simulate, forwards and backwards of all replicas in all.
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

    @property
    def are_over(self) -> bool:
        """Whether no more should be tried, once there is something."""
        return self._actions > self._max_actions or self.time_is_up

    @property
    def time_is_up(self) -> bool:
        """Whether nothing more should be begun."""
        return self._expired()

    def run(self, plan: Plan) -> Plan:
        """The plan with its prediction."""
        self._actions += 2 * plan.micro_batches * sum(stage.replicas for stage in plan.stages)
        return predicted(plan, self.problem.cluster, self.problem.baseline_bytes)

    def fits(self, tried: Plan) -> bool:
        """Whether every rank of a plan that was run stays within its limit."""
        return self._fit(tried, range(tried.ranks))

    def stage_fits(self, tried: Plan, stage: int) -> bool:
        """Whether the ranks of a stage do."""
        held = tried.stages[stage]
        return self._fit(tried, (*held.ranks, *held.backward_ranks))

    def _fit(self, tried: Plan, ranks: Iterable[int]) -> bool:
        assert tried.prediction is not None
        peaks = tried.prediction.peak_memory_bytes
        return all(peaks[rank] <= self.problem.limit_bytes(rank) for rank in ranks)


PLANNER = "pipectl"


def preference(plan: Plan) -> tuple[float, int, int, int]:
    """Lower is better: the predicted step, then the simpler plan."""
    return plan.predicted_step_s, len(plan.stages), sum(plan.warm_up), plan.micro_batches


def largest_load_s(plan: Plan, cluster: Cluster) -> float:
    """What the most loaded rank computes for one micro-batch, which replicas share evenly."""
    loads = [0.0] * plan.ranks
    for stage in plan.stages:
        for ranks, load_s in _shares(stage):
            for rank in ranks:
                loads[rank] += load_s / cluster.device(rank).speed
    return max(loads)


def largest_stage_load_s(plan: Plan, cluster: Cluster) -> float:
    """The same of one stage, whatever else its ranks hold."""
    return max(
        load_s / cluster.device(rank).speed
        for stage in plan.stages
        for ranks, load_s in _shares(stage)
        for rank in ranks
    )


def _shares(stage: Stage) -> Iterator[tuple[tuple[int, ...], float]]:
    """Ranks, and what each of them computes for a micro-batch at speed 1."""
    if not stage.backward_ranks:
        yield stage.ranks, stage.load_s
        return
    yield stage.ranks, stage.cost.forward_s / stage.replicas
    yield stage.backward_ranks, stage.cost.backward_s / stage.replicas


def with_findings(
    plan: Plan,
    cluster: Cluster,
    bound_s: float,
    *,
    load_bound: Bound | None = None,
    finished: bool = True,
    planner: str = PLANNER,
) -> Plan:
    """A plan with what is known of how good it is.

    Args:
        plan: with a prediction; what is known of it already stays.
        bound_s: no step takes less.
        load_bound: of the largest load; by default what follows from ``bound_s``.
        finished: whether the search came to its end.
        planner: who chose.
    """
    if plan.search is not None:
        known = plan.search
    else:
        bound = load_bound or Bound(bound_s / plan.micro_batches, False)
        load_s = largest_load_s(plan, cluster)
        known = Search(planner, load_s, bound.load_s, bound.exact, planning_s=0.0)
    known = known.bounded(plan.predicted_step_s, bound_s)
    return replace(plan, search=replace(known, finished=known.finished and finished))


Simplicity = tuple[int, int, int, int]
"""Stages, recomputed stages, micro-batches in flight, micro-batches: fewer are better where times
tie."""
Family = tuple[int, int, str, tuple[int, ...]]
"""Stages, micro-batch size, schedule and warm-up."""


@dataclass(frozen=True)
class Candidate:
    """A choice and the least its step can take.

    Args:
        micro_batches: of a step.
    """

    choice: Choice
    layout: Layout
    micro_batches: int
    bound_s: float

    @property
    def simplicity(self) -> Simplicity:
        """What is preferred if times tie."""
        choice = self.choice
        again = sum(choice.recompute)
        return len(choice.ranks), again, sum(choice.warm_up), self.micro_batches

    @property
    def family(self) -> Family:
        """What tells candidates apart that differ in more than their cuts."""
        choice = self.choice
        return len(choice.ranks), choice.size, choice.schedule, choice.warm_up


class Candidates:
    """Every layout in every order, by bound and then by simplicity.

    Args:
        layouts: of equally many stages.

    Attributes:
        taken: those that were asked for.
    """

    def __init__(
        self, problem: Problem, layouts: Sequence[Layout], size: int, orders: Sequence[Order]
    ) -> None:
        self._problem = problem
        self._layouts = list(dict.fromkeys(layouts))
        self._size = size
        self._orders = orders
        self.taken: list[Candidate] = []
        self._bounds_s: list[float] = []
        self._ranking: list[int] = []
        if self._layouts:
            warm_ups = [warm_up for _, warm_up in orders]
            bounds = problem.estimator.steps_s(self._layouts, size, warm_ups).ravel()
            again = [sum(layout.recompute) for layout in self._layouts]
            depth = list(map(sum, warm_ups))
            keys = np.tile(depth, len(again)), np.repeat(again, len(depth)), bounds
            self._bounds_s = bounds.tolist()
            self._ranking = np.lexsort(keys).tolist()

    @property
    def next_s(self) -> float:
        """The bound of the next; infinite if all are taken."""
        place = len(self.taken)
        return self._bounds_s[self._ranking[place]] if place < len(self._ranking) else inf

    @property
    def simplicity(self) -> Simplicity:
        """Of the next; there must be one."""
        return self._candidate(self._ranking[len(self.taken)]).simplicity

    def take(self) -> Candidate:
        """The next; there must be one."""
        self.taken.append(self._candidate(self._ranking[len(self.taken)]))
        return self.taken[-1]

    def __iter__(self) -> Iterator[Candidate]:
        """All of them; takes none."""
        return map(self._candidate, self._ranking)

    def best_of_orders(self) -> Iterator[Candidate]:
        """The most promising layout in every order; takes none."""
        best: dict[int, int] = {}
        for number in self._ranking:
            best.setdefault(number % len(self._orders), number)
        return map(self._candidate, best.values())

    def _candidate(self, number: int) -> Candidate:
        layout, order = divmod(number, len(self._orders))
        chosen = self._layouts[layout]
        choice = self._problem.choice(chosen, self._size, self._orders[order])
        count = self._problem.micro_batches(self._size)
        return Candidate(choice, chosen, count, self._bounds_s[number])


MAX_ACTIONS_OF_SEARCH = 200_000
"""Simulated forwards and backwards in all; keeps planning for many ranks to seconds."""


@dataclass(frozen=True)
class Verdict:
    """A simulated candidate that fits."""

    candidate: Candidate
    plan: Plan

    @property
    def step_s(self) -> float:
        """As simulated."""
        return self.plan.predicted_step_s


class Judge:
    """Collects the verdicts on the candidates of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._verdicts: list[Verdict] = []
        self._outcomes: dict[Choice, float] = {}
        self._trials = Trials(problem, max_actions=MAX_ACTIONS_OF_SEARCH)
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
        plan = self._trials.run(self._problem.plan(candidate.choice))
        fits = self._trials.fits(plan)
        self._outcomes[candidate.choice] = plan.predicted_step_s if fits else inf
        if fits:
            self._verdicts.append(Verdict(candidate, plan))
        return fits

    def best(self) -> Verdict | None:
        """The fastest plan that fits; among equals the simplest. None if there is none."""
        if not self._verdicts:
            return None
        ties = [v for v in self._verdicts if v.step_s <= self.fastest_s * (1 + TIE)]
        return min(ties, key=_preference)

    def alternatives(self, best: Verdict, most: int) -> list[Verdict]:
        """The next best that differ from the best, and from each other, in more than their cuts."""
        found = {best.candidate.family: best}
        for verdict in sorted(self._verdicts, key=lambda v: v.step_s):
            found.setdefault(verdict.candidate.family, verdict)
        return list(found.values())[1 : most + 1]

    def families(self) -> set[Family]:
        """Of all that was simulated and fits."""
        return {verdict.candidate.family for verdict in self._verdicts}

    def is_beaten(self, bound_s: float) -> bool:
        """Whether a plan that takes at least so long cannot even tie, or enough were simulated."""
        if bound_s > self.fastest_s * (1 + TIE):
            return True
        enough = self._trials.are_over and bool(self._verdicts)
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
        return min((v.step_s for v in self._verdicts), default=inf)

    def _ties_at_best(self, candidate: Candidate) -> bool:
        """Whether a candidate can at most tie, and is no simpler than what it would tie with."""
        best = self.best() if candidate.bound_s >= self.fastest_s * (1 - TIE) else None
        if best is None or candidate.simplicity < best.candidate.simplicity:
            return False
        equal = candidate.simplicity == best.candidate.simplicity
        return not equal or candidate.bound_s >= best.step_s * (1 - 2 * ROUNDING)

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether the parts of the memory that no schedule avoids are within the limits."""
        problem, choice = self._problem, candidate.choice
        if not problem.has_limits:
            return True
        table = problem.table(choice.members, choice.size)
        shares = problem.shares(choice.size)
        peaks = least_peaks_bytes(table, choice.warm_up, shares, choice.recompute)
        return all(
            problem.baseline_bytes + peak <= problem.limit_bytes(rank)
            for peak, (rank,) in zip(peaks.tolist(), choice.ranks, strict=True)
        )


def _preference(verdict: Verdict) -> tuple[Simplicity, float, Ranks]:
    candidate = verdict.candidate
    return candidate.simplicity, verdict.step_s, candidate.choice.ranks
