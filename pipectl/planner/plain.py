"""Plans without offload, without backwards on other ranks, and with one schedule or two."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.bounds import work_s
from pipectl.planner.explorer import straight_plans
from pipectl.planner.replicas import copied_plans, one_copy, replicated_plans
from pipectl.planner.request import PLACED, PlanRequest
from pipectl.planner.schedules.named import named_plan
from pipectl.profile import Profile

MAX_ALTERNATIVES = 5
"""Plans besides the best."""


def plain_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Callable[[], bool],
    alternatives: int = MAX_ALTERNATIVES,
) -> list[Plan]:
    """The best plan, and the next best of other shapes, with predictions.

    Args:
        request: without variants.
        expired: asked now and then; once it is true, the search ends.
        alternatives: how many plans besides the best.

    Raises:
        InfeasibleError, OutOfTimeError: there is none.
    """
    copies = request.replicas
    if copies == 1 or (copies is None and request.schedule in PLACED):
        return _without_replicas(profile, cluster, request, expired, alternatives)
    if copies is not None:
        own = one_copy(profile, cluster, request, copies)
        alone = _without_replicas(*own, expired, MAX_ALTERNATIVES)
        return copied_plans(profile, cluster, request, alone, copies)
    found = replicated_plans(profile, cluster, request, expired)
    with suppress(*((InfeasibleError, OutOfTimeError) if found else ())):
        one = replace(request, replicas=1)
        alone = straight_plans(profile, cluster, one, expired, MAX_ALTERNATIVES)
        bound_s = work_s(profile, cluster, request)  # steps with replicas may be below the other
        found = [*(_bounded(plan, bound_s) for plan in alone), *found]
    return sorted(found, key=lambda plan: plan.predicted_step_s)


def _without_replicas(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Callable[[], bool],
    alternatives: int,
) -> list[Plan]:
    if request.schedule in PLACED:
        return [named_plan(profile, cluster, request, expired)]
    return straight_plans(profile, cluster, request, expired, alternatives)


def _bounded(plan: Plan, bound_s: float) -> Plan:
    assert plan.search is not None
    return replace(plan, search=plan.search.bounded(plan.predicted_step_s, bound_s))
