"""Stages for ranks that are given, one behind the other, whose devices may differ in speed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from pipectl.cluster import Cluster
from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.costs.devices import Mix, one_each, pools
from pipectl.planner.graph.blocks import condense
from pipectl.planner.graph.downsets import Partition
from pipectl.planner.judge import largest_stage_load_s
from pipectl.planner.partition.cut_space import CutSpace
from pipectl.planner.partition.cutter import Cutter, Fit
from pipectl.planner.partition.estimate import Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile


def cuts_for(problem: Problem, cutter: Cutter, ranks: Sequence[int], size: int) -> list[Partition]:
    """Partitions with the smallest bottleneck, whatever they hold.

    Args:
        ranks: of every stage; several may be the same.
        size: samples of a micro-batch.
    """
    kind_of = {rank: kind for kind, pool in enumerate(problem.devices) for rank in pool.ranks}
    mix = Mix.ordered([kind_of[rank] for rank in ranks], len(problem.devices))
    fit = Fit(size, (1,) * len(ranks), mix, (inf,) * len(problem.devices))
    with suppress(OutOfTimeError):
        return list(dict.fromkeys(cut.partition for cut in cutter.balanced(fit)))
    return []


def on_ranks(
    plan: Plan, ranks: Sequence[int], profile: Profile, cluster: Cluster, request: PlanRequest
) -> Plan:
    """The plan with its stages on these ranks; cut anew where devices are not all alike.

    Args:
        plan: whose stages were cut for whatever rank of the cluster suits them.
        ranks: of every stage.
    """
    found = [_moved(plan, ranks, cluster)]
    if len(pools(cluster)) > 1:
        problem = Problem(profile, cluster, request, condense(profile))
        size = plan.micro_batch_size
        for partition in cuts_for(
            problem, Cutter(problem, CutSpace.plain(problem.graph)), ranks, size
        ):
            layout = Layout(partition, one_each(tuple(ranks)))
            cut = problem.plan(problem.choice(layout, size, (plan.schedule, plan.warm_up)))
            found.append(replace(found[0], stages=cut.stages, transfers=cut.transfers))
    return min(found, key=lambda each: largest_stage_load_s(each, cluster))


def _moved(plan: Plan, ranks: Sequence[int], cluster: Cluster) -> Plan:
    stages = zip(plan.stages, ranks, strict=True)
    return replace(
        plan,
        stages=tuple(replace(stage, ranks=(rank,)) for stage, rank in stages),
        node_of_rank=cluster.node_of_rank,
    )
