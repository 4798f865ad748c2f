"""Judging plans with replicated stages by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import ceil, inf

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Search, Stage
from pipectl.planner.costs import operator_times
from pipectl.planner.problem import assumptions_of, baseline_bytes
from pipectl.planner.replica_costs import ReplicaChoice, ReplicaPlans
from pipectl.planner.request import PlanRequest, micro_batch_sizes
from pipectl.profile import Profile
from pipectl.simulate import simulate

PLANNER = "pipectl"
MOST_ACTIONS = 400_000
"""Simulated forwards and backwards of all replicas."""


def judged(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    choices: Iterable[ReplicaChoice],
    expired: Callable[[], bool] = lambda: False,
    *,
    planner: str = PLANNER,
) -> list[Plan]:
    """The plans of choices that fit, with predictions, the fastest first.

    Of plans with equal numbers of stages, replicas and micro-batches the best stands there.

    Args:
        expired: asked now and then; once it is true, what was found so far is returned.
        planner: who chose.
    """
    makers = ReplicaPlans(profile, cluster, request, assumptions_of(profile, cluster))
    judge = _Judge(profile, cluster, request)
    finished = True
    for choice in choices:
        if judge.has_enough or (judge.found and expired()):
            finished = False
            break
        judge.consider(makers.plan(choice))
    bound_s = work_s(profile, cluster, request)
    said = Search(planner, 0.0, 0.0, exact=False, planning_s=0.0, finished=finished)
    return [replace(plan, search=_search(plan, cluster, said, bound_s)) for plan in judge.ranked()]


class _Judge:
    """Simulates plans, as many as it can afford."""

    def __init__(self, profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
        self._cluster = cluster
        self._limit_bytes = request.memory_limit_bytes
        self._baseline_bytes = baseline_bytes(profile)
        self._actions = 0
        self.found: list[Plan] = []

    @property
    def has_enough(self) -> bool:
        """Whether something was found, with all the effort that is allowed."""
        return self._actions > MOST_ACTIONS and bool(self.found)

    def consider(self, plan: Plan) -> None:
        """Keep a plan if it fits."""
        self._actions += 2 * plan.micro_batches * sum(stage.replicas for stage in plan.stages)
        simulation = simulate(plan, self._cluster, process_baseline_bytes=self._baseline_bytes)
        peaks = enumerate(simulation.peak_memory_bytes)
        if all(peak <= self._limit_of(rank) for rank, peak in peaks):
            self.found.append(replace(plan, prediction=simulation.prediction))

    def ranked(self) -> list[Plan]:
        """The best plan of every shape, the fastest first."""
        shapes: dict[object, Plan] = {}
        for plan in sorted(self.found, key=_preference):
            replicas = tuple(stage.replicas for stage in plan.stages)
            shapes.setdefault((replicas, plan.micro_batches, plan.replication), plan)
        return list(shapes.values())

    def _limit_of(self, rank: int) -> float:
        limits = (self._limit_bytes, self._cluster.device(rank).memory_bytes)
        return min((limit for limit in limits if limit is not None), default=inf)


def step_time_s(plan: Plan) -> float:
    """The predicted step of a plan that has a prediction."""
    assert plan.prediction is not None
    return plan.prediction.step_time_s


def _preference(plan: Plan) -> tuple[float, int, int, int]:
    return step_time_s(plan), len(plan.stages), sum(plan.warm_up), plan.micro_batches


def work_s(profile: Profile, cluster: Cluster, request: PlanRequest) -> float:
    """All work of a step, at the size at which a sample takes least, spread over all devices."""
    speed = sum(cluster.device(rank).speed for rank in range(cluster.ranks))
    sizes = micro_batch_sizes(request, request.batch_size)
    slices = {ceil(size / count) for size in sizes for count in range(1, cluster.ranks + 1)}
    samples_s = (
        sum(map(sum, operator_times(profile, size).cached)) / size for size in sorted(slices)
    )
    return min(samples_s) * request.batch_size / speed


def _search(plan: Plan, cluster: Cluster, search: Search, bound_s: float) -> Search:
    """What is known of how good a plan is: of its step, nothing but the work there is."""
    return replace(
        search,
        max_stage_load_s=max(_load_s(stage, cluster) for stage in plan.stages),
        lower_bound_s=bound_s / plan.micro_batches,
        step_lower_bound_s=bound_s,
        gap=step_time_s(plan) / bound_s - 1 if bound_s else None,
    )


def _load_s(stage: Stage, cluster: Cluster) -> float:
    """Of a micro-batch, on replicas that work side by side."""
    slowest = min(cluster.device(rank).speed for rank in stage.ranks)
    return (stage.cost.forward_s + stage.cost.backward_s) / (stage.replicas * slowest)
