"""What plans are compared by, and what bounds their steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Stage
from pipectl.planner.costs.operator_times import operator_times
from pipectl.planner.request import PlanRequest, micro_batch_sizes
from pipectl.profile import Profile

PLANNER = "pipectl"


def preference(plan: Plan) -> tuple[float, int, int, int]:
    """Lower is better: the predicted step, then the simpler plan."""
    return plan.predicted_step_s, len(plan.stages), sum(plan.warm_up), plan.micro_batches


def largest_load_s(plan: Plan, cluster: Cluster) -> float:
    """What the most loaded rank computes for one micro-batch, which replicas share evenly."""
    loads = [0.0] * plan.ranks
    for stage in plan.stages:
        for ranks, load_s in _shares(stage):
            for rank in ranks:
                loads[rank] += load_s / cluster.device(rank).speed
    return max(loads)


def largest_stage_load_s(plan: Plan, cluster: Cluster) -> float:
    """The same of one stage, whatever else its ranks hold."""
    return max(
        load_s / cluster.device(rank).speed
        for stage in plan.stages
        for ranks, load_s in _shares(stage)
        for rank in ranks
    )


def least_step_s(plan: Plan, cluster: Cluster) -> float:
    """No simulation of a plan takes less: its busiest rank computes all it has to.

    Replicas count as if they shared their stage's work by their speeds.
    """
    share = plan.batch_size / plan.micro_batch_size
    loads = [0.0] * plan.ranks
    for stage in plan.stages:
        for ranks, time_s in (
            (stage.ranks, stage.cost.forward_s),
            (stage.updating_ranks, stage.cost.backward_s),
        ):
            speed = sum(cluster.device(rank).speed for rank in ranks)
            for rank in ranks:
                loads[rank] += time_s * share / speed
    return max(loads)


def work_s(
    profile: Profile, cluster: Cluster, request: PlanRequest, tried: Iterable[int] = ()
) -> float:
    """All work of a step, at the size at which a sample takes least, spread over all devices.

    Args:
        tried: micro-batch sizes besides those that a search with open ones tries.
    """
    speed = sum(cluster.device(rank).speed for rank in range(cluster.ranks))
    sizes = {*tried, *micro_batch_sizes(request, request.batch_size)}
    slices = {ceil(size / count) for size in sizes for count in range(1, cluster.ranks + 1)}
    samples_s = (
        sum(map(sum, operator_times(profile, size).cached)) / size for size in sorted(slices)
    )
    return min(samples_s) * request.batch_size / speed


def _shares(stage: Stage) -> Iterator[tuple[tuple[int, ...], float]]:
    """Ranks, and what each of them computes for a micro-batch at speed 1."""
    if not stage.backward_ranks:
        yield stage.ranks, stage.load_s
        return
    yield stage.ranks, stage.cost.forward_s / stage.replicas
    yield stage.backward_ranks, stage.cost.backward_s / stage.replicas
