"""The least that a step can take with so many stages and such micro-batches, however it is cut.

A stage waits for its first input, works, and then its last gradient travels back. Along a path of
operators whose gradients come back, let stage s have the load l(s) of one micro-batch, of ``full``
micro-batches in all, the last of which has the share r. Then the step takes at least

    max over s of  r (l(1) + ... + l(s-1)) + full l(s),

which is smallest when all stages take equally long, each load 1 - r/full of the one before::

    step >= r T / (1 - (1 - r/full)^stages)        T = l(1) + ... + l(stages)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Plan
from pipectl.planner.costs.operator_times import OperatorTimes
from pipectl.planner.graph.blocks import BlockGraph, bits
from pipectl.planner.request import PlanRequest, micro_batch_sizes
from pipectl.profile import Profile


def outlook_s(
    bottleneck_s: float, path_s: float, shares: Sequence[float], stages: int, fastest: float
) -> float:
    """The least that a step can take, updates left out.

    Args:
        bottleneck_s: least possible.
        path_s: of one micro-batch along a path of operators, at speed 1.
        shares: size of every micro-batch relative to a full one.
        fastest: speed of the fastest device.
    """
    full, last = sum(shares), shares[-1]
    through_s = last * path_s / fastest / (1 - (1 - last / full) ** stages)
    return max(full * bottleneck_s, through_s)


def longest_path_s(graph: BlockGraph, times_s: Sequence[float]) -> float:
    """The longest path along which gradients come back.

    Args:
        times_s: of every block.
    """
    path_s = [0.0] * len(graph)
    returning = {value.producer: 0 for value in graph.values}
    for value in graph.values:
        if value.gradient_bytes:
            returning[value.producer] |= value.blocks & ~(1 << value.producer)
    for block in range(len(graph)):
        path_s[block] += times_s[block]
        for reader in bits(returning.get(block, 0)):
            path_s[reader] = max(path_s[reader], path_s[block])
    return max(path_s)


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
    times = OperatorTimes(profile)
    samples_s = (sum(map(sum, times.at(size).cached)) / size for size in sorted(slices))
    return min(samples_s) * request.batch_size / speed
