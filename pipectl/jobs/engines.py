"""The planners that can be asked for by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pipectl.cluster import Cluster
from pipectl.errors import UsageError
from pipectl.jobs.deadline import Deadline
from pipectl.plan import Plan
from pipectl.planner import PlanRequest
from pipectl.planner.policies import NAMES, OWN
from pipectl.planner.policies.policy_plans import policy_plans
from pipectl.planner.request import Planner
from pipectl.planner.search import MOST_ALTERNATIVES, Found, search_plans
from pipectl.profile import Profile
from pipectl.units import did_you_mean

PIPECTL = OWN
Searcher = Callable[[Profile, Cluster, PlanRequest], Found]
"""Finds the best plan it can, and the next best."""


def searcher_named(name: str, deadline: Deadline) -> Searcher:
    """The planner of a name, with a budget that begins anew for every plan.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in NAMES:
        raise UsageError(
            f"--planner: there is no planner {name!r}{did_you_mean(name, NAMES)}",
            cure=f"one of: {', '.join(NAMES)}",
        )

    def search(profile: Profile, cluster: Cluster, request: PlanRequest) -> Found:
        deadline.restart()
        if name != PIPECTL and request.listed is not None:
            raise UsageError(
                f"--planner {name}: chooses a schedule, but the job has {request.listed.name}",
                cure="leave --planner out, or set pipeline.schedule: auto",
            )
        if name == PIPECTL:
            return search_plans(profile, cluster, request, deadline)
        return _timed(partial(policy_plans, name, profile, cluster, request, deadline))

    return search


def _timed(planner: Callable[[], list[Plan]]) -> Found:
    """What a planner found, with the time it took."""
    started_s = time.perf_counter()
    plan, *others = planner()
    assert plan.search is not None, "planners say how they found a plan"
    taken_s = time.perf_counter() - started_s
    timed = replace(plan, search=replace(plan.search, planning_s=taken_s))
    return Found(timed, tuple(others[:MOST_ALTERNATIVES]))


def planner_named(name: str, deadline: Deadline) -> Planner:
    """The same, of which only the best plan is wanted."""
    search = searcher_named(name, deadline)

    def planner(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
        return search(profile, cluster, request).plan

    return planner
