"""The evaluation of plans: simulated, held against the memory of every rank, and compared.

Every plan that the planner returns was simulated here. Of plans that fit, the fastest is best;
those whose steps differ by less than ``TIE`` are equal, and the simplest of them wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from pipectl.cluster import Cluster
from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan, Search, Stage
from pipectl.planner.assumptions import baseline_bytes
from pipectl.planner.partition.cutter import Bound
from pipectl.planner.problem import Problem
from pipectl.planner.request import PlanRequest
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
    simulation = simulate(plan, cluster, process_baseline_bytes=baseline_bytes)
    return replace(plan, prediction=simulation.prediction)


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


class Evaluator:
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
    def is_exhausted(self) -> bool:
        """Whether no more should be tried, once there is something."""
        return self._actions > self._max_actions or self.time_is_up

    @property
    def time_is_up(self) -> bool:
        """Whether nothing more should be begun."""
        return self._expired()

    def extend(self, max_actions: int) -> None:
        """Allow so many actions more."""
        self._max_actions += max_actions

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
