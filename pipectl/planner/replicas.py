"""Plans in which stages have several replicas: as many as serve the step best, or as asked.

Proposals split every micro-batch over the replicas of a stage. Replicas that take whole
micro-batches in turn do the same work on smaller micro-batches, so a proposal is tried in the ways
that are allowed, the second with the samples that one replica got of a split micro-batch. If every
stage shall have as many replicas, these are copies of a whole pipeline, each with its share of a
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan, Replication
from pipectl.planner.activations.modes import ModeSearch
from pipectl.planner.bounds import work_s
from pipectl.planner.costs.stage_costs import with_halves
from pipectl.planner.explain.what_if import with_ranks
from pipectl.planner.explorer import straight_plans
from pipectl.planner.judge import PLANNER, Trials, preference, with_findings
from pipectl.planner.partition.cut_space import CutSpace
from pipectl.planner.partition.layout import Choice
from pipectl.planner.partition.replicas import MANY_RANKS, Proposal, ReplicaSearch
from pipectl.planner.problem import Problem
from pipectl.planner.request import PLACED, Order, PlanRequest, micro_batch_sizes, open_orders
from pipectl.planner.schedules.named import named_plan, placed_orders
from pipectl.profile import Profile
from pipectl.schedule.one_f_one_b import policy_a, policy_b

MAX_ACTIONS = 400_000
"""Simulated forwards and backwards of all replicas."""
MICRO_BATCHES_PER_RANK = 8
PROPOSALS = 8
"""That are tried in every way."""
NEAR = 12
"""Of what is one move away from the best, so many are simulated, those with the least estimates."""
MAX_SIZES = 8
"""Micro-batch sizes that are tried on very many ranks, the smallest ones."""
MAX_ALTERNATIVES = 5
"""Plans besides the best."""

Expired = Callable[[], bool]


def replicated_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Expired = lambda: False,
) -> list[Plan]:
    """Plans in which some stage has several replicas, with predictions, fastest first.

    Args:
        expired: asked now and then; once it is true, what was found so far is returned.
    """
    problem = Problem(profile, cluster, request)
    if cluster.ranks > MANY_RANKS:
        sizes = micro_batch_sizes(request, request.batch_size)[-MAX_SIZES:]
    else:
        sizes = micro_batch_sizes(request, MICRO_BATCHES_PER_RANK * cluster.ranks)
    search = ReplicaSearch(problem, CutSpace.plain(problem.graph), sizes, expired)
    proposals = {
        choice: proposal
        for proposal in search.proposals(PROPOSALS)
        for choice in _ways(problem, proposal)
    }
    plans = judged(problem, proposals, expired)
    if cluster.ranks > MANY_RANKS:
        return plans
    best = None
    while plans and plans[0] is not best and not expired():
        best = plans[0]
        near = search.near(next(p for c, p in proposals.items() if _is_of(best, c, problem)))
        fresh = {
            choice: proposal
            for proposal in near[:NEAR]
            for choice in _ways(problem, proposal)
            if choice not in proposals and choice.replication is best.replication
        }
        proposals |= fresh
        better = judged(problem, fresh, expired)
        if better and better[0].predicted_step_s < best.predicted_step_s:
            plans = [*better, *plans]
    return plans


def _is_of(plan: Plan, choice: Choice, problem: Problem) -> bool:
    """Whether a plan was made of a choice, whatever its order."""
    return (
        choice.size == plan.micro_batch_size
        and choice.replication is plan.replication
        and choice.ranks == tuple(stage.ranks for stage in plan.stages)
        and choice.members == problem.members_of_plan(plan)
    )


def _ways(problem: Problem, proposal: Proposal) -> Iterator[Choice]:
    """A proposal in every way that is allowed, with no replica that has nothing to do."""
    _, shared_size, layout = proposal
    request, members = problem.request, problem.members(layout.partition)
    for way in request.replications:
        sizes = [shared_size]
        if way is Replication.WHOLE and request.micro_batches is None:
            counts = {len(held) for held in layout.ranks}
            sizes = sorted({ceil(shared_size / count) for count in counts}, reverse=True)
        for size in sizes:
            most = size if way is Replication.SPLIT else ceil(request.batch_size / size)
            ranks = tuple(held[:most] for held in layout.ranks)
            replicas = tuple(map(len, ranks))
            if max(replicas) > 1:
                for order in replica_orders(replicas, way, size, request):
                    yield Choice(members, ranks, size, *order, way)


def replica_orders(
    replicas: Sequence[int], replication: Replication, size: int, request: PlanRequest
) -> list[Order]:
    """Orders to try with stages that have replicas.

    Args:
        replicas: of every stage.
        size: samples of a micro-batch.
    """
    stages, count = len(replicas), ceil(request.batch_size / size)
    in_turn = replicas if replication is Replication.WHOLE else None
    warm_ups = [policy(stages, count, in_turn) for policy in (policy_a, policy_b)]
    return open_orders(request, stages, count, warm_ups)


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
    trials = Trials(problem, expired, max_actions=MAX_ACTIONS)
    modes = ModeSearch(trials, (False,))
    found: list[Plan] = []
    unfit: list[Plan] = []
    finished = True
    for choice in choices:
        if found and trials.are_over:
            finished = False
            break
        tried = modes.simplest(with_halves(problem.plan(choice), problem.profile))
        (found if trials.fits(tried) else unfit).append(tried)
    best_s = min((plan.predicted_step_s for plan in found), default=inf)
    for plan in sorted(unfit, key=preference):
        if best_s < inf and (trials.are_over or plan.predicted_step_s >= best_s):
            break
        again = modes.within_memory(plan)
        if again is not None:
            found.append(again)
            best_s = min(best_s, again.predicted_step_s)
    shapes: dict[object, Plan] = {}
    for plan in sorted(found, key=preference):
        replicas = tuple(stage.replicas for stage in plan.stages)
        shapes.setdefault((replicas, plan.micro_batches, plan.replication), plan)
    # Of the step, nothing is known but the work there is.
    bound_s = work_s(problem.profile, problem.cluster, problem.request)
    return [
        with_findings(plan, problem.cluster, bound_s, finished=finished, planner=planner)
        for plan in shapes.values()
    ]


def one_copy(
    profile: Profile, cluster: Cluster, request: PlanRequest, copies: int
) -> tuple[Profile, Cluster, PlanRequest]:
    """What one of several copies has for itself: the first ranks, and samples of a step.

    If copies share out the optimizer's state, the profile has an even share of it.

    Raises:
        InfeasibleError: more copies than ranks.
    """
    if copies > cluster.ranks:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas of every stage, but only {cluster.ranks} ranks",
            cure="use fewer replicas, or ask for more ranks",
        )
    if request.shard_optimizer:
        optimizer = profile.optimizer_cost
        state = optimizer.state_bytes_per_parameter_byte / copies
        optimizer = replace(optimizer, state_bytes_per_parameter_byte=state)
        profile = replace(profile, optimizer=optimizer)
    batches = request.micro_batches
    alone = replace(
        request,
        replicas=1,
        batch_size=ceil(request.batch_size / copies),
        micro_batches=None if batches is None else ceil(batches / copies),
    )
    return profile, with_ranks(cluster, cluster.ranks // copies), alone


def copied_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    alone: Sequence[Plan],
    copies: int,
) -> list[Plan]:
    """Plans of all copies together, with predictions, fastest first.

    Args:
        alone: plans of one copy; see :func:`one_copy`.

    Raises:
        InfeasibleError: none fits.
    """
    problem = Problem(profile, cluster, request)
    found = judged(problem, (choice for plan in alone for choice in _copied(problem, plan, copies)))
    if not found:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas of every stage take too much memory",
            cure="use fewer replicas, so that every pipeline has more ranks",
        )
    return found


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
            replicas = (copies,) * len(plan.stages)
            if request.schedule in PLACED:
                in_turn = replicas if way is Replication.WHOLE else None
                orders = placed_orders(plan, request, problem.micro_batches(size), in_turn)
            else:
                orders = replica_orders(replicas, way, size, request)
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
    if copies == 1 or (copies is None and request.schedule in PLACED):
        if request.schedule in PLACED:
            return [named_plan(profile, cluster, request, expired)]
        return straight_plans(profile, cluster, request, expired, alternatives)
    if copies is not None:
        own = one_copy(profile, cluster, request, copies)
        alone = plain_plans(*own, expired)
        return copied_plans(profile, cluster, request, alone, copies)
    found = replicated_plans(profile, cluster, request, expired)
    with suppress(*((InfeasibleError, OutOfTimeError) if found else ())):
        one = replace(request, replicas=1)
        alone = straight_plans(profile, cluster, one, expired, MAX_ALTERNATIVES)
        bound_s = work_s(profile, cluster, request)  # steps with replicas may be below the other
        found = [*(with_findings(plan, cluster, bound_s) for plan in alone), *found]
    return sorted(found, key=lambda plan: plan.predicted_step_s)
