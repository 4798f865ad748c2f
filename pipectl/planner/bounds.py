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

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil, floor, inf
from operator import attrgetter

from pipectl.cluster import Cluster
from pipectl.lanes import TransferKind
from pipectl.plan import Plan, Replication, Search, Stage
from pipectl.planner.choices import micro_batch_sizes
from pipectl.planner.graph.blocks import BlockGraph, bits
from pipectl.planner.problem import Problem
from pipectl.schedule.registry import is_unflushed

PLANNER = "pipectl"


def area_bound_s(
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
    """Lower bound on the simulated step of a plan: the time of its busiest rank, with its update;
    if ranks update together, this or the work of its busiest node per core, and the longest update.

    A rank waits until a micro-batch has passed the stages before its first, and its last gradient
    has to return through them. Weight halves of split backwards may run meanwhile, or, if ranks do
    not update together, in the next step of the first stage. The busiest replica of a stage is
    taken to have its share by speed, and for the work of nodes each to have the least it may get.
    """
    share, ranks = plan.batch_size / plan.micro_batch_size, range(plan.ranks)
    speeds = [cluster.device(rank).speed for rank in ranks]
    times_s = [_times_s(stage, speeds) for stage in plan.stages]
    through_s = _through_s(plan, times_s)
    first_s, last_s = ([inf] * plan.ranks for _ in range(2))
    loads, least, weights, updates = ([0.0] * plan.ranks for _ in range(4))
    for stage, (before_s, after_s), (forward_s, backward_s, weight_s) in zip(
        plan.stages, through_s, times_s, strict=True
    ):
        for own_ranks, time_s in ((stage.ranks, forward_s), (stage.updating_ranks, backward_s)):
            for rank in own_ranks:
                loads[rank] += time_s * share
                first_s[rank] = min(first_s[rank], before_s)
                last_s[rank] = min(last_s[rank], after_s)
        for own_ranks, work_s in (
            (stage.ranks, stage.cost.forward_s),
            (stage.updating_ranks, stage.cost.backward_s),
        ):
            for rank in own_ranks:
                least[rank] += work_s * _least_share(plan, len(own_ranks)) / speeds[rank]
        for rank in stage.updating_ranks:
            weights[rank] += weight_s * share
            if not plan.shard_optimizer:
                updates[rank] += stage.cost.update_s / speeds[rank]
    used = [rank for rank in ranks if first_s[rank] < inf]
    if not (plan.updates_together_on(cluster) or is_unflushed(plan)):
        own_s = max(loads[rank] + updates[rank] for rank in ranks)
        there_s = (first_s[rank] + loads[rank] - weights[rank] + last_s[rank] for rank in used)
        return max(own_s, max(there_s) if _all_return(plan) else 0.0)
    busiest_s = max(
        first_s[rank] + max(loads[rank], loads[rank] - weights[rank] + last_s[rank])
        for rank in used
    )
    nodes = [0.0] * len(cluster.nodes)
    for rank in ranks:
        nodes[cluster.node_of_rank[rank]] += least[rank]
    per_core = (load_s / node.cores for load_s, node in zip(nodes, cluster.nodes, strict=True))
    return max(busiest_s, *per_core) + (0.0 if is_unflushed(plan) else max(updates))


def _least_share(plan: Plan, replicas: int) -> float:
    """The least that one of so many replicas computes in a step, in full micro-batches."""
    if replicas == 1:
        return plan.batch_size / plan.micro_batch_size
    shares, size = plan.micro_batch_shares, plan.micro_batch_size
    if plan.replication is Replication.SPLIT:
        return sum(floor(round(share * size) / replicas) for share in shares) / size
    return sum(sorted(shares)[: len(shares) // replicas])


def _times_s(stage: Stage, speeds: Sequence[float]) -> tuple[float, float, float]:
    """Forward, backward, and the weight half of a split backward, of one full micro-batch."""
    cost, speed = stage.cost, sum(speeds[rank] for rank in stage.updating_ranks)
    forward_s = cost.forward_s / sum(speeds[rank] for rank in stage.ranks)
    return forward_s, cost.backward_s / speed, (cost.weight_s or 0.0) / speed


def _through_s(
    plan: Plan, times_s: Sequence[tuple[float, float, float]]
) -> list[tuple[float, float]]:
    """Per stage, the least time before its first forward, and after its last backward; 0 if steps
    overlap.

    Args:
        times_s: of every stage, from :func:`_times_s`.
    """
    before_s, after_s = ([0.0] * len(plan.stages) for _ in range(2))
    part = min(plan.micro_batch_shares)
    transfers = [] if is_unflushed(plan) else sorted(plan.transfers, key=attrgetter("source"))
    for each in transfers:
        if each.kind is TransferKind.ACTIVATION:
            forward_s = part * times_s[each.source][0]
            before_s[each.target] = max(before_s[each.target], before_s[each.source] + forward_s)
        elif each.kind is TransferKind.GRADIENT:
            _, whole_s, weight_s = times_s[each.target]
            backward_s = part * (whole_s - weight_s)
            after_s[each.source] = max(after_s[each.source], after_s[each.target] + backward_s)
    return list(zip(before_s, after_s, strict=True))


def _all_return(plan: Plan) -> bool:
    """Whether gradients of every stage return to the first one."""
    returning = {0}
    for each in sorted(plan.transfers, key=attrgetter("source")):
        if each.kind is TransferKind.GRADIENT and each.target in returning:
            returning.add(each.source)
    return len(returning) == len(plan.stages)


def work_bound_s(problem: Problem, tried: Iterable[int] = ()) -> float:
    """All work of a step, spread over all devices, at the size with the least time per sample.

    Args:
        tried: micro-batch sizes besides those that an open search tries.
    """
    cluster, request = problem.cluster, problem.request
    speed = sum(cluster.device(rank).speed for rank in range(cluster.ranks))
    sizes = {*tried, *micro_batch_sizes(request, request.batch_size)}
    slices = {ceil(size / count) for size in sizes for count in range(1, cluster.ranks + 1)}
    samples_s = (float(problem.costs.times.at(size).cached.sum()) / size for size in sorted(slices))
    return min(samples_s) * request.batch_size / speed


def copies_bound_s(problem: Problem, copies: int) -> float:
    """Lower bound on the step of so many copies of a pipeline, for all numbers of stages."""
    cluster, fastest = problem.cluster, max(problem.speeds)
    most = problem.request.fixed_stages or min(cluster.ranks // copies, len(problem.graph))
    bounds_s = [inf]
    for size in micro_batch_sizes(problem.request, problem.request.batch_size):
        if size >= copies:
            times = problem.costs.block_times(ceil(size / copies), cached=True)
            bottleneck_s = max(sum(times) / most, max(times)) / fastest
            path_s = longest_path_s(problem.graph, times)
            bounds_s.append(area_bound_s(bottleneck_s, path_s, problem.shares(size), most, fastest))
    return min(bounds_s)


def with_findings(
    plan: Plan,
    bound_s: float,
    *,
    finished: bool = True,
) -> Plan:
    """A plan with the lower bound on its step.

    Args:
        plan: with a prediction.
        bound_s: lower bound on the step; replaces one that the plan has.
        finished: whether the search was completed.
    """
    known = plan.search or Search(PLANNER, planning_s=0.0)
    known = known.bounded(plan.predicted_step_s, bound_s)
    return replace(plan, search=replace(known, finished=known.finished and finished))
