"""Judging plans with replicated stages by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Search
from pipectl.planner.activations.blocks import BlockPlans
from pipectl.planner.activations.modes import Keeping, ways
from pipectl.planner.assumptions import baseline_bytes
from pipectl.planner.bounds import work_s
from pipectl.planner.costs.stage_costs import with_halves
from pipectl.planner.judge import PLANNER, Trials, largest_load_s, preference
from pipectl.planner.partition.plans import Choice, PlanBuilder
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile

MOST_ACTIONS = 400_000
"""Simulated forwards and backwards of all replicas."""


def judged(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    choices: Iterable[Choice],
    expired: Callable[[], bool] = lambda: False,
    *,
    planner: str = PLANNER,
) -> list[Plan]:
    """The plans of choices that fit, with predictions, the fastest first.

    Of plans with equal numbers of stages, replicas and micro-batches the best stands there. Those
    that do not fit recompute if they may, as long as that could be faster than what does.

    Args:
        expired: asked now and then; once it is true, what was found so far is returned.
        planner: who chose.
    """
    makers = PlanBuilder(profile, cluster, request)
    limit_bytes, baseline = request.memory_limit_bytes, baseline_bytes(profile)
    trials = Trials(cluster, limit_bytes, baseline, expired, max_actions=MOST_ACTIONS)
    allowed = ways(request.recompute_choices, (False,), request.block_choices)
    keeping = Keeping(allowed, trials, cluster, BlockPlans(profile).of)
    found: list[Plan] = []
    unfit: list[Plan] = []
    finished = True
    for choice in choices:
        if found and trials.are_over:
            finished = False
            break
        tried = keeping.simplest(with_halves(makers.plan(choice), profile))
        (found if trials.fits(tried) else unfit).append(tried)
    found += _held(unfit, found, keeping, trials)
    bound_s = work_s(profile, cluster, request)
    said = Search(planner, 0.0, 0.0, exact=False, planning_s=0.0, finished=finished)
    return [replace(plan, search=_search(plan, cluster, said, bound_s)) for plan in _ranked(found)]


def _held(
    unfit: Iterable[Plan], found: Sequence[Plan], keeping: Keeping, trials: Trials
) -> list[Plan]:
    """Plans that fit if stages recompute, and could be faster than those that were found."""
    held: list[Plan] = []
    for plan in sorted(unfit, key=preference):
        best_s = min((known.predicted_step_s for known in (*found, *held)), default=inf)
        if best_s < inf and (trials.are_over or plan.predicted_step_s >= best_s):
            break
        again = keeping.within_memory(plan)
        held += [] if again is None else [again]
    return held


def _ranked(found: Iterable[Plan]) -> list[Plan]:
    """The best plan of every shape, the fastest first."""
    shapes: dict[object, Plan] = {}
    for plan in sorted(found, key=preference):
        replicas = tuple(stage.replicas for stage in plan.stages)
        shapes.setdefault((replicas, plan.micro_batches, plan.replication), plan)
    return list(shapes.values())


def _search(plan: Plan, cluster: Cluster, search: Search, bound_s: float) -> Search:
    """What is known of how good a plan is: of its step, nothing but the work there is."""
    loads = replace(
        search,
        max_stage_load_s=largest_load_s(plan, cluster),
        lower_bound_s=bound_s / plan.micro_batches,
    )
    return loads.bounded(plan.predicted_step_s, bound_s)
