"""The least that the step of one plan takes, from its own costs."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf

import numpy as np

from pipectl.arrays import Floats
from pipectl.cluster import Cluster
from pipectl.plan import Plan
from pipectl.planner.proof.links import Ways
from pipectl.planner.proof.shares import portions_of, shape_of, shares_of
from pipectl.planner.proof.units import FULL, LAST, Loads, Shape, least_step_s
from pipectl.simulate.reduction import reduction_s


def plan_bound_s(plan: Plan, cluster: Cluster, ways: Ways, best_s: float = inf) -> float:
    """No simulation of a plan of the 1F1B family takes less; infinite if it reaches ``best_s``."""
    replicas = [stage.replicas for stage in plan.stages]
    shape = shape_of(replicas, plan.replication, plan.micro_batches)
    last = plan.batch_size - (plan.micro_batches - 1) * plan.micro_batch_size
    how = replicas, plan.replication, plan.micro_batch_size, last
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    speed = np.array([cluster.device(rank).speed for rank in ranks], np.float64)
    work_s = shares_of(*how)[:, None, :] * _times(plan) / speed
    held_s, late_s, busiest_s = _messages(plan, ways, shape, portions_of(*how), ranks)
    updates = np.repeat([stage.cost.update_s for stage in plan.stages], replicas) / speed
    reduce_s = [
        reduction_s(cluster, plan.node_of_rank, stage.ranks, stage.cost.accumulated_bytes)
        for stage in plan.stages
    ]
    loads = Loads(work_s, held_s, late_s, np.array(reduce_s, np.float64), float(updates.max()))
    if busiest_s + loads.update_s >= best_s:
        return inf
    found_s = least_step_s(shape, loads, np.array(plan.warm_up, np.int64), best_s)
    return max(found_s, busiest_s + loads.update_s)


def _times(plan: Plan) -> Floats:
    """Forward and backward of a whole micro-batch on each unit; shape [2, units]."""
    found = [
        (
            stage.cost.forward_s,
            stage.cost.backward_s + (stage.cost.forward_s if stage.recompute else 0.0),
        )
        for stage in plan.stages
        for _ in stage.ranks
    ]
    return np.array(found, np.float64).T


def _messages(
    plan: Plan, ways: Ways, shape: Shape, portions: Floats, ranks: list[int]
) -> tuple[Floats, Floats, float]:
    """Times and latencies of all messages, and how long the busiest link is held in a step."""
    units = len(ranks)
    held_s, late_s = np.full((2, units, units), -1.0), np.zeros((units, units))
    busy: dict[Hashable, float] = {}
    for item in plan.transfers:
        for one in range(shape.first[item.source], shape.first[item.source + 1]):
            for other in range(shape.first[item.target], shape.first[item.target + 1]):
                way = ways.between(ranks[one], ranks[other])
                counts = _counts(shape, one, other)
                for size in (FULL, LAST):
                    part = portions[size, one, other]
                    if part > 0 and counts[size]:
                        sizes = item.size_bytes * part
                        held_s[size, one, other] = max(link.hold_s(sizes) for _, link in way)
                        for key, link in way:
                            busy[key] = busy.get(key, 0.0) + link.hold_s(sizes) * counts[size]
                late_s[one, other] = ways.late_s(ranks[one], ranks[other])
    return held_s, late_s, max(busy.values(), default=0.0)


def _counts(shape: Shape, one: int, other: int) -> tuple[int, int]:
    """Full micro-batches that two units have in common, and whether the last one is among them."""
    index = np.arange(shape.micro_batches)
    common = np.ones(shape.micro_batches, np.bool_)
    for unit in (one, other):
        common &= index % shape.period[unit] == shape.phase[unit]
    return int(common[:-1].sum()), int(common[-1])
