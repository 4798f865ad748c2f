"""Lower bounds on the step time, and how far plans are above them.

A stage waits for its first input, computes, and then its last gradient travels back. Take a path of
operators along which gradients return. Let l(s) be the load of one micro-batch in stage s, ``full``
the number of micro-batches as a multiple of a full one, and r the share of the last. Then the step
takes at least

    max over s of  r (l(1) + ... + l(s-1)) + full l(s),

which is smallest if all stages give the same value, each load 1 - r/full of the one before::

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
    """A lower bound on the bottleneck of partitions.

    Args:
        load_s: no partition has a smaller bottleneck.
        exact: whether some partition has this bottleneck.
    """

    load_s: float
    exact: bool


def outlook_s(
    bottleneck_s: float, path_s: float, shares: Sequence[float], stages: int, fastest: float
) -> float:
    """Lower bound on the step, without updates.

    Args:
        bottleneck_s: lower bound on the bottleneck.
        path_s: of one micro-batch along a path of operators, at speed 1.
        shares: size of every micro-batch relative to a full one.
        fastest: speed of the fastest device.
    """
    full, last = sum(shares), shares[-1]
    through_s = last * path_s / fastest / (1 - (1 - last / full) ** stages)
    return max(full * bottleneck_s, through_s)


def longest_path_s(graph: BlockGraph, times_s: Sequence[float]) -> float:
    """The longest path along which gradients return.

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
    """Lower bound on the simulated step of a plan: the computations of its busiest rank.

    Replicas are taken to share their stage's work in proportion to their speeds.
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
    """All work of a step, spread over all devices, at the size with the least time per sample.

    Args:
        tried: micro-batch sizes besides those that an open search tries.
    """
    cluster, request = problem.cluster, problem.request
    speed = sum(cluster.device(rank).speed for rank in range(cluster.ranks))
    sizes = {*tried, *micro_batch_sizes(request, request.batch_size)}
    slices = {ceil(size / count) for size in sizes for count in range(1, cluster.ranks + 1)}
    samples_s = (float(problem.times.at(size).cached.sum()) / size for size in sorted(slices))
    return min(samples_s) * request.batch_size / speed


def largest_load_s(plan: Plan, cluster: Cluster) -> float:
    """Largest load of a rank for one micro-batch, which replicas share evenly."""
    loads = [0.0] * plan.ranks
    for stage in plan.stages:
        for ranks, load_s in _shares(stage):
            for rank in ranks:
                loads[rank] += load_s / cluster.device(rank).speed
    return max(loads)


def largest_stage_load_s(plan: Plan, cluster: Cluster) -> float:
    """Largest load of one stage on a rank for one micro-batch, without other stages of the rank."""
    return max(
        load_s / cluster.device(rank).speed
        for stage in plan.stages
        for ranks, load_s in _shares(stage)
        for rank in ranks
    )


def _shares(stage: Stage) -> Iterator[tuple[tuple[int, ...], float]]:
    """(ranks, seconds that each of them computes per micro-batch at speed 1)."""
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
    """A plan with the lower bounds on it.

    Args:
        plan: with a prediction; bounds that it already has stay.
        bound_s: lower bound on the step.
        load_bound: of the largest stage; by default derived from ``bound_s`` for the most loaded
            rank.
        finished: whether the search was completed.
        planner: name of the planner.
    """
    if plan.search is not None:
        known = plan.search
    else:
        bound = load_bound or Bound(bound_s / plan.micro_batches, False)
        load_s = (largest_stage_load_s if load_bound else largest_load_s)(plan, cluster)
        known = Search(planner, load_s, bound.load_s, bound.exact, planning_s=0.0)
    known = known.bounded(plan.predicted_step_s, bound_s)
    return replace(plan, search=replace(known, finished=known.finished and finished))
