"""A plan with given stages, one a rank, for partitions that no search for the step has chosen."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Replication
from pipectl.planner.assumptions import assumptions_of, baseline_bytes
from pipectl.planner.plans.replica_costs import ReplicaChoice, ReplicaPlans, members_of
from pipectl.planner.request import PlanRequest
from pipectl.planner.trials import predicted
from pipectl.profile import Profile
from pipectl.schedule import default_warm_up
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B


def plan_of_stages(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    stages: Sequence[Sequence[str]],
) -> Plan:
    """The plan, with its prediction, that runs each stage on the rank of its number.

    Args:
        cluster: with at least as many ranks as there are stages.
        request: without micro-batches, those of the profile's size are taken.
        stages: ids of the operators of each, in the order of the pipeline.
    """
    size = ceil(request.batch_size / _micro_batches(profile, request))
    choice = ReplicaChoice(
        members=members_of(profile, stages),
        ranks=tuple((rank,) for rank in range(len(stages))),
        size=size,
        replication=Replication.WHOLE,
        schedule=ONE_F_ONE_B.name,
        warm_up=default_warm_up(ONE_F_ONE_B.name, len(stages), ceil(request.batch_size / size)),
    )
    plan = ReplicaPlans(profile, cluster, request, assumptions_of(profile, cluster)).plan(choice)
    return predicted(plan, cluster, baseline_bytes(profile))


def _micro_batches(profile: Profile, request: PlanRequest) -> int:
    return request.micro_batches or ceil(request.batch_size / profile.micro_batch_size)
