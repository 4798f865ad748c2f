"""The planners that can be asked for by name."""

from __future__ import annotations

from pipectl.cluster import Cluster
from pipectl.errors import UsageError
from pipectl.jobs.deadline import Deadline
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.sweep import Planner
from pipectl.profile import Profile
from pipectl.units import did_you_mean

PIPECTL = "pipectl"
NAMES = (PIPECTL,)


def planner_named(name: str, deadline: Deadline) -> Planner:
    """The planner of a name, with a budget that begins anew for every plan.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in NAMES:
        raise UsageError(
            f"--planner: there is no planner {name!r}{did_you_mean(name, NAMES)}",
            cure=f"one of: {', '.join(NAMES)}",
        )

    def planner(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
        deadline.restart()
        return make_plan(profile, cluster, request)

    return planner
