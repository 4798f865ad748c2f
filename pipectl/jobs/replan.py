"""Plans again for a job that trains: ``python -m pipectl.jobs.replan RUN_DIRECTORY``.

Rank 0 starts it when ranks compute at other speeds than their plan expects
(:mod:`pipectl.runtime.rebalancing`), as a process of its own: training goes on meanwhile, and the
planner's memory is none of rank 0's. It reads what rank 0 has measured and writes the better plan.

Results may not depend on it, so the micro-batches stay, and so do copies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, PipectlError
from pipectl.plan import Plan, Stage
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.job_request import request_of_job
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.runs.rebalance import Balance, Imbalance
from pipectl.simulate import simulate
from pipectl.spec import load

_MIN_GAIN = 0.1
"""Minimum share of a step that another plan must save."""
_MIN_RETURN = 3.0
"""The steps that are left must save this multiple of what the move costs."""
_NICENESS = 10


def propose(run: RunDirectory) -> Balance:
    """Plan for the measured speeds; the plan and its prediction are written beside the answer.

    Raises:
        PipectlError: a file is damaged, or no plan fits.
    """
    imbalance, folder = Imbalance.load(run.imbalance), run.rebalance
    plan, spec = Plan.load(run.plan), load(run.job)
    known = folder / "profile.json"  # as corrected for the plan that is now in use
    profile = Profile.load(known if known.exists() else run.profile)
    measured = list(zip(plan.stages, imbalance.factors, strict=True))
    profile = profile.scaled(
        {n: (factor, factor) for stage, factor in measured for n in stage.nodes}
    )
    cluster = shared(Cluster.load(run.cluster), imbalance.shares)
    now = replace(plan, stages=tuple(_slower(*each) for each in measured))
    before_s = simulate(now, cluster).step_time_s
    parent = os.getppid()
    try:
        better = make_plan(
            profile,
            cluster,
            _like(plan, request_of_job(spec, profile, cluster, plan.micro_batches)),
            expired=lambda: os.getppid() != parent,
        )
    except InfeasibleError:
        return Balance(pays=False, before_s=before_s, after_s=before_s, operators=0)
    after_s = better.predicted_step_s
    before, after = _ranks_of(plan), _ranks_of(better)
    moved = sum(after.get(node) != ranks for node, ranks in before.items())
    gain_s = before_s - after_s
    is_worth = gain_s * imbalance.steps > _MIN_RETURN * imbalance.move_s
    pays = gain_s >= _MIN_GAIN * before_s and is_worth
    if pays:
        replace(better, key=plan.key).save(folder / "plan.json")
        simulate(better, cluster).timeline.save(folder / "predicted.json")
        profile.save(folder / "profile.next.json")
    return Balance(pays=pays, before_s=before_s, after_s=after_s, operators=moved)


def shared(cluster: Cluster, shares: Sequence[float]) -> Cluster:
    """Return the cluster with these shares of its ranks."""
    rest = iter(shares)
    nodes = (replace(each, shares=tuple(islice(rest, each.ranks))) for each in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


def _ranks_of(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {node: plan.stages[index].ranks for node, index in plan.stage_of.items()}


def _slower(stage: Stage, factor: float) -> Stage:
    segments = None if stage.segments is None else stage.segments.scaled(factor)
    return replace(stage, cost=stage.cost.scaled(factor), segments=segments)


def _like(plan: Plan, request: PlanRequest) -> PlanRequest:
    """Return the request without choices on which results depend, or that the ranks have made."""
    offloads = any(stage.offload for stage in plan.stages)
    return replace(
        request,
        micro_batches=plan.micro_batches,
        replicas=plan.stages[0].replicas,
        replication=plan.replication,
        offload=request.offload if offloads else False,
        backward_apart=any(stage.backward_ranks for stage in plan.stages),
        key=None,
    )


def main(arguments: Sequence[str]) -> int:
    """Answer rank 0; returns the exit code."""
    with suppress(OSError):
        os.nice(_NICENESS)
    run = RunDirectory(Path(arguments[0]))
    try:
        balance = propose(run)
    except PipectlError as error:
        sys.stderr.write(f"the plan stays: {error}\n")
        balance = Balance(pays=False, before_s=0.0, after_s=0.0, operators=0)
    balance.save(run.balance)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
