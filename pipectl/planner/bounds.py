"""What is known of how good plans are, and the least that a step can take however it is cut.

A stage waits for its first input, works, and then its last gradient travels back. Along a path of
operators whose gradients come back, let stage s have the load l(s) of one micro-batch, of ``full``
micro-batches in all, the last of which has the share r. Then the step takes at least

    max over s of  r (l(1) + ... + l(s-1)) + full l(s),

which is smallest when all stages take equally long, each load 1 - r/full of the one before::

    step >= r T / (1 - (1 - r/full)^stages)        T = l(1) + ... + l(stages)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Search, Stage
from pipectl.planner.graph.blocks import BlockGraph, bits
from pipectl.planner.problem import Problem
from pipectl.planner.request import micro_batch_sizes

PLANNER = "pipectl"


@dataclass(frozen=True)
class Bound:
    """What is known of the smallest possible bottleneck.

    Args:
        load_s: no partition has a smaller one.
        exact: whether a partition has this one.
    """

    load_s: float
    exact: bool


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


def work_s(problem: Problem, tried: Iterable[int] = ()) -> float:
    """All work of a step, at the size at which a sample takes least, spread over all devices.

    Args:
        tried: micro-batch sizes besides those that a search with open ones tries.
    """
    cluster, request = problem.cluster, problem.request
    speed = sum(cluster.device(rank).speed for rank in range(cluster.ranks))
    sizes = {*tried, *micro_batch_sizes(request, request.batch_size)}
    slices = {ceil(size / count) for size in sizes for count in range(1, cluster.ranks + 1)}
    samples_s = (sum(map(sum, problem.times.at(size).cached)) / size for size in sorted(slices))
    return min(samples_s) * request.batch_size / speed


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


def _shares(stage: Stage) -> Iterator[tuple[tuple[int, ...], float]]:
    """Ranks, and what each of them computes for a micro-batch at speed 1."""
    if not stage.backward_ranks:
        yield stage.ranks, stage.load_s
        return
    yield stage.ranks, stage.cost.forward_s / stage.replicas
    yield stage.backward_ranks, stage.cost.backward_s / stage.replicas


def with_findings(
    plan: Plan,
    cluster: Cluster,
    bound_s: float,
    *,
    load_bound: Bound | None = None,
    finished: bool = True,
    planner: str = PLANNER,
) -> Plan:
    """A plan with what is known of how good it is.

    Args:
        plan: with a prediction; what is known of it already stays.
        bound_s: no step takes less.
        load_bound: of the largest stage; by default what follows from ``bound_s`` of the most
            loaded rank.
        finished: whether the search came to its end.
        planner: who chose.
    """
    if plan.search is not None:
        known = plan.search
    else:
        bound = load_bound or Bound(bound_s / plan.micro_batches, False)
        load_s = (largest_stage_load_s if load_bound else largest_load_s)(plan, cluster)
        known = Search(planner, load_s, bound.load_s, bound.exact, planning_s=0.0)
    known = known.bounded(plan.predicted_step_s, bound_s)
    return replace(plan, search=replace(known, finished=known.finished and finished))
