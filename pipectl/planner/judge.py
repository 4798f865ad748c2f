"""Plans on trial: simulated, held against the memory of every rank, and compared.

Every plan that the planner returns was simulated here. Of plans that fit, the fastest is best;
those whose steps differ by less than ``TIE`` are equal, and the simplest of them wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pipectl.cluster import Cluster
from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan, Stage
from pipectl.planner.assumptions import baseline_bytes
from pipectl.planner.partition.plans import PlanBuilder
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
    plan = PlanBuilder(profile, cluster, request).stages_in_turn(stages)
    return predicted(plan, cluster, baseline_bytes(profile))


def out_of_time() -> OutOfTimeError:
    """The error to raise when time was over before there was any plan."""
    return OutOfTimeError("planning was ended before any plan was found", cure="allow more time")


class Trials:
    """Simulates plans.

    Args:
        limit_bytes: of every rank, besides its device's memory.
        baseline_bytes: of a process without a stage.
        expired: asked now and then; once it is true, no more is tried.
        max_actions: to simulate, forwards and backwards of all replicas in all.
    """

    def __init__(
        self,
        cluster: Cluster,
        limit_bytes: int | None,
        baseline_bytes: int,
        expired: Callable[[], bool] = lambda: False,
        *,
        max_actions: int = MAX_ACTIONS,
    ) -> None:
        self._cluster = cluster
        self._limit_bytes = limit_bytes
        self._baseline_bytes = baseline_bytes
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
        return predicted(plan, self._cluster, self._baseline_bytes)

    def fits(self, tried: Plan) -> bool:
        """Whether every rank of a plan that was run stays within its limit."""
        return all(self.rank_fits(tried, rank) for rank in range(tried.ranks))

    def stage_fits(self, tried: Plan, stage: int) -> bool:
        """Whether the ranks of a stage do."""
        held = tried.stages[stage]
        return all(self.rank_fits(tried, rank) for rank in (*held.ranks, *held.backward_ranks))

    def rank_fits(self, tried: Plan, rank: int) -> bool:
        """Whether one rank does."""
        assert tried.prediction is not None
        return tried.prediction.peak_memory_bytes[rank] <= self.limit_of(rank)

    def limit_of(self, rank: int) -> float:
        """Bytes that a rank may hold."""
        return self._cluster.memory_of(rank, self._limit_bytes)


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
