"""Plans in which every stage has equally many replicas, and what is tried of a fixed choice.

Such replicas are copies of a whole pipeline, each with its share of a step: one copy is planned for
its share of the ranks and samples, and then all are simulated together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError
from pipectl.plan import Plan, Replication
from pipectl.planner.bounds import work_s
from pipectl.planner.costs.stage_costs import with_halves
from pipectl.planner.evaluate import PLANNER, preference, with_findings
from pipectl.planner.explain.what_if import with_ranks
from pipectl.planner.explorer import MAX_ACTIONS_OF_REPLICAS, explore
from pipectl.planner.partition.layout import Choice
from pipectl.planner.problem import Problem
from pipectl.planner.request import PLACED, PlanRequest, open_orders
from pipectl.planner.schedules.named import named_plan, placed_orders
from pipectl.planner.shortlist import Shortlist
from pipectl.profile import Profile

MAX_ALTERNATIVES = 5
"""Plans besides the best."""

Expired = Callable[[], bool]


def judged(
    problem: Problem,
    choices: Iterable[Choice],
    expired: Expired = lambda: False,
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
    shortlist = Shortlist(problem, expired, max_actions=MAX_ACTIONS_OF_REPLICAS)
    shortlist.consider(with_halves(problem.plan(each), problem.profile) for each in choices)
    shapes: dict[object, Plan] = {}
    for plan in sorted(shortlist.plans, key=preference):
        replicas = tuple(stage.replicas for stage in plan.stages)
        shapes.setdefault((replicas, plan.micro_batches, plan.replication), plan)
    # Of the step, nothing is known but the work there is.
    bound_s = work_s(problem.profile, problem.cluster, problem.request)
    return [
        with_findings(plan, problem.cluster, bound_s, finished=shortlist.finished, planner=planner)
        for plan in shapes.values()
    ]


def _copied_plans(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired, copies: int
) -> list[Plan]:
    """Plans of all copies together, with predictions, fastest first.

    Raises:
        InfeasibleError: there are more copies than ranks, or nothing fits.
    """
    if copies > cluster.ranks:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas of every stage, but only {cluster.ranks} ranks",
            cure="use fewer replicas, or ask for more ranks",
        )
    own = profile
    if request.shard_optimizer:  # a copy has its share of the optimizer's state
        optimizer = profile.optimizer_cost
        state = optimizer.state_bytes_per_parameter_byte / copies
        own = replace(profile, optimizer=replace(optimizer, state_bytes_per_parameter_byte=state))
    count = request.micro_batches
    one = replace(
        request,
        replicas=1,
        batch_size=ceil(request.batch_size / copies),
        micro_batches=None if count is None else ceil(count / copies),
    )
    alone = plain_plans(own, with_ranks(cluster, cluster.ranks // copies), one, expired)
    problem = Problem(profile, cluster, request)
    plans = judged(problem, (choice for plan in alone for choice in _copied(problem, plan, copies)))
    if not plans:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas of every stage take too much memory",
            cure="use fewer replicas, so that every pipeline has more ranks",
        )
    return plans


def _copied(problem: Problem, plan: Plan, copies: int) -> Iterator[Choice]:
    """With replicas that are neighbours, and with copies one after the other."""
    members, request = problem.members_of_plan(plan), problem.request
    firsts = [stage.ranks[0] for stage in plan.stages]
    together = tuple(tuple(first * copies + copy for copy in range(copies)) for first in firsts)
    apart = tuple(tuple(first + copy * plan.ranks for copy in range(copies)) for first in firsts)
    for ranks in (together, apart):
        for way in request.replications:
            size = plan.micro_batch_size
            if way is Replication.SPLIT and request.micro_batches is None:
                size *= copies
            elif way is Replication.SPLIT:
                assert request.micro_batches is not None
                size = max(copies, ceil(request.batch_size / request.micro_batches))
            count = problem.micro_batches(size)
            in_turn = (copies,) * len(plan.stages) if way is Replication.WHOLE else None
            if request.schedule in PLACED:
                stages, held = len(plan.stages), len(set(firsts))
                orders = placed_orders(plan.schedule, stages, held, request, count, in_turn)
            else:
                orders = open_orders(request, len(plan.stages), count, in_turn)
            for order in orders:
                yield Choice(members, ranks, size, *order, way)


def plain_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Expired,
    alternatives: int = MAX_ALTERNATIVES,
) -> list[Plan]:
    """The best plan, and the next best of other shapes, with predictions.

    Args:
        request: without variants: no offload, no backwards on other ranks, one schedule or two.
        expired: asked now and then; once it is true, the search ends.
        alternatives: how many plans besides the best.

    Raises:
        InfeasibleError, OutOfTimeError: there is none.
    """
    copies = request.replicas
    if copies in (None, 1):
        if request.schedule in PLACED:
            return [named_plan(profile, cluster, request, expired)]
        return explore(profile, cluster, request, expired, alternatives)
    assert copies is not None
    return _copied_plans(profile, cluster, request, expired, copies)
