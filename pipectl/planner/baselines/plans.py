"""Plans with the stages, replicas and ranks that a planner of the literature chooses.

Such a planner does not choose the micro-batch size or the order of the work. Both are chosen by
simulation, as for our own plans, so that only the planner's choices differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError
from pipectl.plan import Plan, Replication
from pipectl.planner.baselines import POLICIES, PolicyPlan, Work, dapple, pipedream
from pipectl.planner.costs.links import Links
from pipectl.planner.explain.what_if import with_ranks
from pipectl.planner.partition.layout import Choice, Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import (
    OTHER_SCHEDULES,
    PlanRequest,
    micro_batch_sizes,
    open_orders,
    takes,
)
from pipectl.planner.search import plans_of_choices
from pipectl.profile import Profile

_MICRO_BATCHES_PER_RANK = 4
_CURE = "leave it to the planner, or use --planner pipectl"
REPLICATING = {dapple.NAME: Replication.SPLIT, pipedream.NAME: Replication.WHOLE}
"""Policies whose stages may have replicas, which share samples or take whole micro-batches."""


def policy_plans(
    name: str,
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Callable[[], bool] = lambda: False,
    *,
    planner: str | None = None,
) -> list[Plan]:
    """Plans that fit, with a policy's stages, over micro-batch sizes and orders, fastest first.

    Args:
        name: of the policy.
        planner: name of the planner in the plans; by default that of the policy.
        expired: called before every simulation; once true, the plans so far are returned.

    Raises:
        InfeasibleError: the policy cannot meet the request, or its plans do not fit: most policies
            do not consider memory.
    """
    if request.schedule in OTHER_SCHEDULES:
        raise InfeasibleError(f"no feasible plan: {name} plans for gpipe and 1f1b only", cure=_CURE)
    choices = _choices(name, profile, cluster, request)
    # These planners do not consider memory, so stages recompute only if all must.
    wanted = replace(request, recompute=bool(request.recompute), blocks=bool(request.blocks))
    problem = Problem(profile, cluster, wanted)
    plans = plans_of_choices(problem, choices, expired, planner=planner or name)
    if not plans:
        raise InfeasibleError(
            f"no feasible plan: the stages that {name} chooses need more memory than a rank may "
            f"take, or more replicas than a micro-batch has samples; {name} ignores both",
            cure=f"give {request.more_memory(cluster)}, or use --planner pipectl",
        )
    return plans


def _choices(
    name: str, profile: Profile, cluster: Cluster, request: PlanRequest
) -> Iterator[Choice]:
    """Choices with every micro-batch size, schedule and warm-up in which replicas get samples."""
    replication = REPLICATING.get(name, Replication.WHOLE)
    for size in micro_batch_sizes(request, _MICRO_BATCHES_PER_RANK * cluster.ranks):
        chosen = _given(name, profile, cluster, request, size)
        layout, replicas = Layout(chosen.partition, chosen.ranks), tuple(map(len, chosen.ranks))
        split = replication is Replication.SPLIT
        if split and (max(replicas) > size or not takes(request, size, max(replicas))):
            continue
        in_turn = replicas if replication is Replication.WHOLE else None
        count = ceil(request.batch_size / size)
        for schedule, warm_up in open_orders(request, len(replicas), count, in_turn):
            yield Choice(layout, size, schedule, warm_up, replication)


def _given(
    name: str, profile: Profile, cluster: Cluster, request: PlanRequest, size: int
) -> PolicyPlan:
    stages = request.fixed_stages
    if stages is not None and name not in REPLICATING:
        cluster = with_ranks(cluster, min(stages, cluster.ranks))
    chosen = POLICIES[name](profile, Links(cluster), Work(request.batch_size, size))
    if stages not in (None, len(chosen.ranks)):
        made = f"{name} makes {len(chosen.ranks)} stages here, not {stages}"
        raise InfeasibleError(f"no feasible plan: {made}", cure=_CURE)
    return chosen
