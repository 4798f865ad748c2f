"""The search for the best plan, with whatever the request allows.

With one rank a stage, see :mod:`pipectl.planner.straight`; with replicas,
:mod:`pipectl.planner.replicas`; with offload, backwards on other ranks or several stages a
rank, :mod:`pipectl.planner.variants`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.bounds import work_s
from pipectl.planner.judge import TIE
from pipectl.planner.listed import listed_plan
from pipectl.planner.replicas import copied_plans, one_copy, replicated_plans
from pipectl.planner.request import PLACED, PlanRequest
from pipectl.planner.straight import straight_plans
from pipectl.planner.techniques.placed import placed_plan
from pipectl.planner.unflushed import unflushed_plan
from pipectl.planner.variants import varied_plans
from pipectl.profile import Profile
from pipectl.schedule import SCHEDULES

MOST_ALTERNATIVES = 5
Expired = Callable[[], bool]


@dataclass(frozen=True)
class Found:
    """The best plan, and the next best of other shapes.

    Args:
        alternatives: plans that differ in more than their cuts, with predictions, fastest first.
    """

    plan: Plan
    alternatives: tuple[Plan, ...] = ()


def make_plan(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Expired = lambda: False,
) -> Plan:
    """The fastest plan found by simulation that fits into memory, with its prediction.

    Args:
        expired: asked now and then; once it is true, the best plan so far is returned, or, where
            there is none, an even cut.

    Raises:
        InfeasibleError: nothing fits; says how much is missing and what would help.
        OutOfTimeError: time was over before any plan was found, and even cuts do not fit.
    """
    return _ranked(profile, cluster, request, expired, 0)[0]


def search_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Expired = lambda: False,
) -> Found:
    """As :func:`make_plan`, with the next best plans."""
    plan, *others = _ranked(profile, cluster, request, expired, MOST_ALTERNATIVES)
    return Found(plan, tuple(others[:MOST_ALTERNATIVES]))


def _ranked(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired, alternatives: int
) -> list[Plan]:
    """The best plan, and the next best."""
    started_s = perf_counter()
    if request.listed is not None:
        found = [listed_plan(make_plan, profile, cluster, request, expired)]
    elif request.schedule is not None and not SCHEDULES[request.schedule].flushes:
        found = [unflushed_plan(make_plan, profile, cluster, request, expired)]
    elif request.has_variants:
        found = varied_plans(_several, profile, cluster, request, expired)
    elif (request.replicas or 1) > 1:
        found = _copies(profile, cluster, request, request.replicas or 1, expired)
    elif request.schedule in PLACED:
        found = [placed_plan(make_plan, profile, cluster, request, expired)]
    elif request.replicas is None:
        found = _with_replicas(profile, cluster, request, expired)
    else:
        found = _one_rank_a_stage(profile, cluster, request, expired, alternatives)
    return [_timed(found[0], perf_counter() - started_s), *found[1:]]


def _copies(
    profile: Profile, cluster: Cluster, request: PlanRequest, copies: int, expired: Expired
) -> list[Plan]:
    """Plans in which every stage has as many replicas."""
    alone = _several(*one_copy(profile, cluster, request, copies), expired)
    return copied_plans(profile, cluster, request, alone, copies)


def _one_rank_a_stage(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired, alternatives: int
) -> list[Plan]:
    """Plans with one rank a stage; where memory is short, also with stages in blocks.

    Raises:
        InfeasibleError, OutOfTimeError: there is none.
    """
    reason: InfeasibleError | None = None
    found: list[Plan] = []
    try:
        found = straight_plans(profile, cluster, request, expired, alternatives)
    except InfeasibleError as error:
        if request.blocks is False:
            raise
        reason = error
    is_short = not found or any(stage.recompute for stage in found[0].stages)
    if request.blocks is None and is_short:
        with suppress(InfeasibleError, OutOfTimeError):
            in_blocks = varied_plans(_several, profile, cluster, request, expired)
            found = in_blocks if not found or _is_faster(in_blocks[0], found[0]) else found
    if reason is not None and not found:
        raise reason
    return found


def _is_faster(plan: Plan, other: Plan) -> bool:
    return plan.predicted_step_s < other.predicted_step_s * (1 - TIE)


def _several(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired
) -> list[Plan]:
    return _ranked(profile, cluster, request, expired, MOST_ALTERNATIVES)


def _with_replicas(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired
) -> list[Plan]:
    """Plans with and without replicas; of equals the ones without come first.

    What is proven of steps without replicas is not of those with.
    """
    found = replicated_plans(profile, cluster, request, expired)
    with suppress(*((InfeasibleError, OutOfTimeError) if found else ())):
        straight = _several(profile, cluster, replace(request, replicas=1), expired)
        bound_s = work_s(profile, cluster, request)
        found = [*(_bounded(plan, bound_s) for plan in straight), *found]
    return sorted(found, key=lambda plan: plan.predicted_step_s)


def _bounded(plan: Plan, bound_s: float) -> Plan:
    if plan.search is None:
        return plan
    return replace(plan, search=plan.search.bounded(plan.predicted_step_s, bound_s))


def _timed(plan: Plan, planning_s: float) -> Plan:
    if plan.search is None:
        return plan
    return replace(plan, search=replace(plan.search, planning_s=planning_s))
