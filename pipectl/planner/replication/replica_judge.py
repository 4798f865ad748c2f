"""Judging plans with replicated stages by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Search
from pipectl.planner.assumed import assumptions_of, baseline_bytes
from pipectl.planner.plans.replica_costs import ReplicaChoice, ReplicaPlans
from pipectl.planner.rating import PLANNER, largest_load_s, preference, work_s
from pipectl.planner.request import PlanRequest
from pipectl.planner.trials import Trials
from pipectl.profile import Profile

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
    limit_bytes, baseline = request.memory_limit_bytes, baseline_bytes(profile)
    trials = Trials(cluster, limit_bytes, baseline, expired, most_actions=MOST_ACTIONS)
    found: list[Plan] = []
    finished = True
    for choice in choices:
        if found and trials.are_over:
            finished = False
            break
        tried = trials.run(makers.plan(choice))
        found += [tried] if trials.fits(tried) else []
    bound_s = work_s(profile, cluster, request)
    said = Search(planner, 0.0, 0.0, exact=False, planning_s=0.0, finished=finished)
    return [replace(plan, search=_search(plan, cluster, said, bound_s)) for plan in _ranked(found)]


def _ranked(found: Iterable[Plan]) -> list[Plan]:
    """The best plan of every shape, the fastest first."""
    shapes: dict[object, Plan] = {}
    for plan in sorted(found, key=preference):
        replicas = tuple(stage.replicas for stage in plan.stages)
        shapes.setdefault((replicas, plan.micro_batches, plan.replication), plan)
    return list(shapes.values())


def _search(plan: Plan, cluster: Cluster, search: Search, bound_s: float) -> Search:
    """What is known of how good a plan is: of its step, nothing but the work there is."""
    loads = replace(
        search,
        max_stage_load_s=largest_load_s(plan, cluster),
        lower_bound_s=bound_s / plan.micro_batches,
    )
    return loads.bounded(plan.predicted_step_s, bound_s)
