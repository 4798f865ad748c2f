"""The planner: the best plan with whatever a request allows.

- Stages, their ranks and replicas: :mod:`pipectl.planner.explorer`.
- Equally many replicas of every stage: :mod:`pipectl.planner.copies`.
- Named schedules with several stages per rank: :mod:`pipectl.planner.schedules.named`.
- With offload, blocks, backwards on other ranks, or any schedule: :mod:`pipectl.planner.variants`.
- Schedules that no step flushes: :mod:`pipectl.planner.schedules.unflushed`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.copies import MAX_ALTERNATIVES, plain_plans
from pipectl.planner.evaluate import TIE
from pipectl.planner.request import PLACED, PlanRequest
from pipectl.planner.schedules.named import named_plan
from pipectl.planner.schedules.unflushed import unflushed_plan
from pipectl.planner.variants import varied_plans
from pipectl.profile import Profile
from pipectl.schedule import SCHEDULES

__all__ = ["MAX_ALTERNATIVES", "Found", "make_plan", "search_plans"]
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
        expired: asked now and then; once it is true, the best plan so far is returned, or, if
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
    plan, *others = _ranked(profile, cluster, request, expired, MAX_ALTERNATIVES)
    return Found(plan, tuple(others[:MAX_ALTERNATIVES]))


def _ranked(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired, alternatives: int
) -> list[Plan]:
    """The best plan, and the next best."""
    started_s = perf_counter()
    if request.listed is not None:
        plans = [named_plan(profile, cluster, request, expired)]
    elif request.schedule is not None and not SCHEDULES[request.schedule].flushes:
        plans = [unflushed_plan(profile, cluster, request, expired)]
    elif request.has_variants:  # a job usually leaves schedule, offload and backwards open
        plans = varied_plans(profile, cluster, request, expired)
    elif request.blocks is None and request.replicas == 1 and request.schedule not in PLACED:
        plans = _blocks_if_short(profile, cluster, request, expired, alternatives)
    else:
        plans = plain_plans(profile, cluster, request, expired, alternatives)
    best = plans[0]
    if best.search is not None:
        planning_s = perf_counter() - started_s
        best = replace(best, search=replace(best.search, planning_s=planning_s))
    return [best, *plans[1:]]


def _blocks_if_short(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired, alternatives: int
) -> list[Plan]:
    """Plans with one rank per stage; if memory is short, also with stages in blocks.

    Raises:
        InfeasibleError, OutOfTimeError: there is none.
    """
    plans: list[Plan] = []
    reason: InfeasibleError | None = None
    try:
        plans = plain_plans(profile, cluster, request, expired, alternatives)
    except InfeasibleError as error:
        reason = error
    if not plans or any(stage.recompute for stage in plans[0].stages):
        with suppress(InfeasibleError, OutOfTimeError):
            others = varied_plans(profile, cluster, request, expired)
            limit_s = plans[0].predicted_step_s * (1 - TIE) if plans else float("inf")
            plans = others if others[0].predicted_step_s < limit_s else plans
    if reason is not None and not plans:
        raise reason
    return plans
