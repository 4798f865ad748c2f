"""A plan with given stages, one a rank, for partitions that no search for the step has chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Replication, StageCost
from pipectl.planner.assumed import assumptions_of, baseline_bytes
from pipectl.planner.plans.replica_costs import ReplicaChoice, ReplicaPlans, members_of
from pipectl.planner.request import PlanRequest
from pipectl.planner.trials import predicted
from pipectl.profile import Profile
from pipectl.schedule import default_warm_up
from pipectl.schedule.one_f_one_b import NAME as ONE_F_ONE_B


def plan_of_stages(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    stages: Sequence[Sequence[str]],
    loads_s: Sequence[float | None],
) -> Plan:
    """The plan, with its prediction, that runs each stage on the rank of its number.

    Args:
        cluster: with at least as many ranks as there are stages.
        request: without micro-batches, those of the profile's size are taken.
        stages: ids of the operators of each, in the order of the pipeline.
        loads_s: forward and backward of one micro-batch of the profile's size, for stages that run
            on another kind of device than the profile was measured on; None elsewhere.
    """
    size = ceil(request.batch_size / _micro_batches(profile, request))
    choice = ReplicaChoice(
        members=members_of(profile, stages),
        ranks=tuple((rank,) for rank in range(len(stages))),
        size=size,
        replication=Replication.WHOLE,
        schedule=ONE_F_ONE_B,
        warm_up=default_warm_up(ONE_F_ONE_B, len(stages), ceil(request.batch_size / size)),
    )
    plan = ReplicaPlans(profile, cluster, request, assumptions_of(profile, cluster)).plan(choice)
    scale = size / profile.micro_batch_size
    timed = tuple(
        stage if load_s is None else replace(stage, cost=_taking(stage.cost, load_s * scale))
        for stage, load_s in zip(plan.stages, loads_s, strict=True)
    )
    return predicted(replace(plan, stages=timed), cluster, baseline_bytes(profile))


def _micro_batches(profile: Profile, request: PlanRequest) -> int:
    return request.micro_batches or ceil(request.batch_size / profile.micro_batch_size)


def _taking(cost: StageCost, load_s: float) -> StageCost:
    """The cost of a stage on a device on which it takes so long, split as it was before."""
    before_s = cost.forward_s + cost.backward_s
    forward_s = load_s * cost.forward_s / before_s if before_s else load_s
    return replace(cost, forward_s=forward_s, backward_s=load_s - forward_s)
