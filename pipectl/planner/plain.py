"""Plans without variants: stages, their ranks and replicas, micro-batches, and the order of work.

If every stage has the same number of replicas, these are copies of a whole pipeline: one copy is
planned for its share of the ranks and samples, and then all copies are simulated together. If the
numbers of replicas are open, stage by stage, copies are planned as well, for the numbers of them
that are promising.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf

from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan, Replication
from pipectl.planner.bounds import copies_bound_s, with_findings, work_bound_s
from pipectl.planner.choices import open_orders, takes
from pipectl.planner.explorer import MAX_ACTIONS_OF_REPLICAS, explore
from pipectl.planner.judge import Judge, best_first
from pipectl.planner.named import named_plan
from pipectl.planner.other_schedules import orders_of_schedule
from pipectl.planner.partition.layout import Choice, Layout
from pipectl.planner.plans import plan_of
from pipectl.planner.problem import Problem
from pipectl.planner.request import OTHER_SCHEDULES, Expired, PlanRequest
from pipectl.planner.simple import promising_copies
from pipectl.units import plural

MAX_STARTS = 5
"""Plans besides the best from which others are derived."""
MIN_GAIN_OF_COPIES = 0.01
"""Copies of a pipeline are planned if the lower bound of their step is shorter by this share."""
SHARES_OF_MORE_BYTES = 1.0, 0.5, 0.25
"""If no copies fit, one copy is planned again with less memory by these shares of what they need
more than it does alone: with more stages, it is less."""


def plain_plans(problem: Problem, expired: Expired, alternatives: int = MAX_STARTS) -> list[Plan]:
    """The best plan, and the next best of other shapes, with predictions.

    Args:
        problem: its request is without variants: no offload, no backwards on other ranks, only
            1F1B or GPipe unless another schedule is named.
        expired: called repeatedly; once it returns true, the search ends.
        alternatives: number of plans besides the best.

    Raises:
        InfeasibleError, OutOfTimeError: there is no plan.
    """
    copies = problem.request.replicas
    if copies not in (None, 1):
        return _copied_plans(problem, expired, copies)
    if problem.request.schedule in OTHER_SCHEDULES:
        return [named_plan(problem, expired)]
    if copies == 1:
        return explore(problem, expired, alternatives)
    return _plans_with_copies(problem, expired, alternatives)


def _plans_with_copies(problem: Problem, expired: Expired, alternatives: int) -> list[Plan]:
    """Plans with any number of replicas per stage, and copies of whole pipelines.

    Copies are planned for the numbers of them whose even cuts have the shortest steps, if a lower
    bound says that their steps could be shorter than the best so far.

    Raises:
        InfeasibleError, OutOfTimeError: there is no plan.
    """
    plans, failed = list[Plan](), None
    try:
        plans = explore(problem, expired, alternatives)
    except (InfeasibleError, OutOfTimeError) as error:
        failed = error
    for copies in promising_copies(problem):
        fastest_s = min((plan.predicted_step_s for plan in plans), default=inf)
        if copies_bound_s(problem, copies) < fastest_s * (1 - MIN_GAIN_OF_COPIES):
            with suppress(InfeasibleError, OutOfTimeError):
                found = _copied_plans(problem, expired, copies)
                plans += [plan for plan in found if has_size_asked_for(plan, problem.request)]
    if failed is not None and not plans:
        raise failed
    return best_first(plans)[: 1 + alternatives]


def has_size_asked_for(plan: Plan, request: PlanRequest) -> bool:
    """Whether micro-batches are as many as requested; copies may need a multiple of them."""
    count = request.micro_batches
    return count is None or plan.micro_batch_size == ceil(request.batch_size / count)


def _copied_plans(problem: Problem, expired: Expired, copies: int) -> list[Plan]:
    """Plans of several copies of a pipeline, with predictions, fastest first.

    A sum of gradients over replicas needs memory that one copy alone does not. If no copies fit,
    one is planned again with less memory.

    Raises:
        InfeasibleError: there are more copies than ranks, or nothing fits.
    """
    request, ranks = replace(problem.request, replicas=copies), problem.cluster.ranks
    if copies > ranks:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas of every stage, but only {ranks} ranks",
            hint="use fewer replicas, or ask for more ranks",
        )
    problem = problem.on(request=request)
    one = one_copy(problem, copies)
    alone = plain_plans(one, expired)
    copied = [choice for plan in alone for choice in copies_of(problem, plan, copies)]
    if request.smallest is not None and not copied:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas would split a micro-batch of an epoch into "
            f"parts of fewer than {plural(request.smallest.samples, 'sample')}: "
            f"{request.smallest.reason}",
            hint="use fewer replicas or larger micro-batches; data.drop_last: true leaves an "
            "incomplete last batch out",
        )
    judge = Judge(problem, max_actions=MAX_ACTIONS_OF_REPLICAS)
    judge.consider(plan_of(problem, choice) for choice in copied)
    missing = 0 if judge.plans else _more_bytes_of_copies(judge.closest, alone)
    for share in SHARES_OF_MORE_BYTES if missing else ():
        if not judge.plans and not expired():
            with suppress(InfeasibleError, OutOfTimeError):
                alone = plain_plans(_with_less_memory(one, ceil(share * missing)), expired)
                copied = [choice for plan in alone for choice in copies_of(problem, plan, copies)]
                judge.consider(plan_of(problem, choice) for choice in copied)
    if not judge.plans:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas of every stage take too much memory",
            hint="use fewer replicas, so that every pipeline has more ranks",
        )
    bound_s = work_bound_s(problem, judge.evaluator.sizes)  # the only one: the total work
    plans = best_first(judge.plans)
    return [with_findings(plan, bound_s, finished=judge.finished) for plan in plans]


def _more_bytes_of_copies(closest: Plan | None, alone: Sequence[Plan]) -> int:
    """Bytes by which copies that nearly fit need more than the same stages alone."""

    def peak_bytes(plan: Plan) -> int:
        assert plan.prediction is not None
        return max(plan.prediction.peak_memory_bytes)

    nodes = [] if closest is None else [stage.nodes for stage in closest.stages]
    same = [plan for plan in alone if [stage.nodes for stage in plan.stages] == nodes]
    if closest is None or not same:
        return 0
    return peak_bytes(closest) - max(map(peak_bytes, same))


def _with_less_memory(problem: Problem, less_bytes: int) -> Problem:
    """The problem with so much less memory on every rank whose memory is limited."""
    limit = problem.request.memory_limit_bytes
    lower = None if limit is None else limit - less_bytes
    return problem.on(
        cluster=problem.cluster.with_more_memory(-less_bytes),
        request=replace(problem.request, memory_limit_bytes=lower),
    )


def one_copy(problem: Problem, copies: int) -> Problem:
    """The ranks and samples of one of several copies of a pipeline."""
    request, profile = problem.request, problem.profile
    count = request.micro_batches
    cluster = problem.cluster.with_ranks(problem.cluster.ranks // copies)
    one = replace(
        request,
        replicas=1,
        batch_size=ceil(request.batch_size / copies),
        micro_batches=None if count is None else ceil(count / copies),
    )
    if not request.shard_optimizer:
        return problem.on(cluster=cluster, request=one)
    # Each copy holds a share of the optimizer's state.
    optimizer = profile.optimizer_cost
    state = optimizer.state_bytes_per_parameter_byte / copies
    own = replace(profile, optimizer=replace(optimizer, state_bytes_per_parameter_byte=state))
    return Problem(own, cluster, one, problem.graph)


def copies_of(problem: Problem, plan: Plan, copies: int) -> Iterator[Choice]:
    """Choices with the replicas of a stage on neighbouring ranks, and with copy after copy."""
    request, partition = problem.request, problem.partition_of(s.nodes for s in plan.stages)
    firsts = [stage.ranks[0] for stage in plan.stages]
    together = tuple(tuple(first * copies + copy for copy in range(copies)) for first in firsts)
    apart = tuple(tuple(first + copy * plan.ranks for copy in range(copies)) for first in firsts)
    for ranks in (together, apart):
        for replication in request.replications:
            size = plan.micro_batch_size
            if (
                request.reproducible and request.micro_batches is not None
            ):  # the same for any copies
                size = ceil(request.batch_size / request.micro_batches)
            if replication is Replication.SPLIT and request.micro_batches is None:
                size *= copies
            elif replication is Replication.SPLIT:
                assert request.micro_batches is not None
                size = max(copies, ceil(request.batch_size / request.micro_batches))
            if not takes(request, size, copies if replication is Replication.SPLIT else 1):
                continue
            count = problem.micro_batches(size)
            in_turn = (copies,) * len(plan.stages) if replication is Replication.WHOLE else None
            if plan.schedule in OTHER_SCHEDULES:
                shape = len(plan.stages), len(set(firsts))
                orders = orders_of_schedule(plan.schedule, *shape, request, count, in_turn)
            else:
                orders = open_orders(request, len(plan.stages), count, in_turn)
            for order in orders:
                yield Choice(Layout(partition, ranks), size, *order, replication)
