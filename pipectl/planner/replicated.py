"""Plans with replicated stages: proposed by the hybrid search, judged by the simulator.

The hybrid search splits every micro-batch over the replicas of a stage. Replicas that take whole
micro-batches in turn do the same work on smaller micro-batches, so each of its proposals is tried
in the ways that are allowed, the second with the samples that one replica got of a split one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, inf

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError
from pipectl.plan import Plan, Replication, Search
from pipectl.planner.costs import operator_times
from pipectl.planner.hybrid import ClusterRules, HybridPlan, HybridRequest, States, hybrid_plans
from pipectl.planner.other_clusters import with_ranks
from pipectl.planner.problem import assumptions_of, baseline_bytes
from pipectl.planner.replica_costs import ReplicaChoice, ReplicaPlans
from pipectl.planner.request import PlanRequest, micro_batch_sizes
from pipectl.profile import Profile
from pipectl.schedule.gpipe import NAME as GPIPE
from pipectl.schedule.gpipe import warm_up as gpipe_warm_up
from pipectl.schedule.one_f_one_b import NAME as ONE_F_ONE_B
from pipectl.schedule.one_f_one_b import policy_a, policy_b
from pipectl.simulate import simulate

PLANNER = "pipectl"
MICRO_BATCHES_PER_RANK = 8
PROPOSALS = 8
"""Of the hybrid search, tried in every way."""
MOST_ACTIONS = 400_000
"""Simulated forwards and backwards in all."""


def replicated_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Callable[[], bool] = lambda: False,
) -> list[Plan]:
    """Plans in which some stage has several replicas, with predictions, fastest first.

    Plans with equal numbers of stages, replicas and micro-batches stand there once; none if
    nothing fits.

    Args:
        expired: asked now and then; once it is true, what was found so far is returned.
    """
    return _judged(profile, cluster, request, _choices(profile, cluster, request, expired), expired)


def copied_plans(
    profile: Profile, cluster: Cluster, request: PlanRequest, alone: Sequence[Plan]
) -> list[Plan]:
    """The same for copies of whole pipelines.

    Args:
        request: ``replicas`` is the number of copies.
        alone: plans of one copy for its share of the samples, on the first of every ``replicas``
            ranks.
    """
    choices = (choice for plan in alone for choice in _copies(profile, plan, request))
    return _judged(profile, cluster, request, choices, lambda: False)


def one_copy(cluster: Cluster, request: PlanRequest) -> tuple[Cluster, PlanRequest]:
    """What one of several copies of a pipeline has for itself: ranks, and samples of a step.

    Raises:
        InfeasibleError: more copies than ranks.
    """
    count = request.replicas or 1
    if count > cluster.ranks:
        raise InfeasibleError(
            f"no feasible plan: {count} replicas of every stage, but only {cluster.ranks} ranks",
            cure="use fewer replicas, or ask for more ranks",
        )
    return with_ranks(cluster, cluster.ranks // count), share_of_one_copy(request)


def share_of_one_copy(request: PlanRequest) -> PlanRequest:
    """The samples and micro-batches of one of several copies."""
    count, batches = request.replicas or 1, request.micro_batches
    return replace(
        request,
        replicas=1,
        batch_size=ceil(request.batch_size / count),
        micro_batches=None if batches is None else ceil(batches / count),
    )


def _copies(profile: Profile, plan: Plan, request: PlanRequest) -> Iterator[ReplicaChoice]:
    """Copies side by side (replicas are neighbours) and one behind the other."""
    count = request.replicas or 1
    index = {operator.id: number for number, operator in enumerate(profile.operators)}
    members = tuple(tuple(sorted(index[node] for node in stage.nodes)) for stage in plan.stages)
    firsts = [stage.ranks[0] for stage in plan.stages]
    for ranks in (
        tuple(tuple(rank * count + copy for copy in range(count)) for rank in firsts),
        tuple(tuple(rank + copy * plan.ranks for copy in range(count)) for rank in firsts),
    ):
        for replication in request.replications:
            size = plan.micro_batch_size * (count if replication is Replication.SPLIT else 1)
            replicas = (count,) * len(firsts)
            for schedule, warm_up in _orders(replicas, replication, size, request):
                yield ReplicaChoice(members, ranks, size, replication, schedule, warm_up)


def _judged(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    choices: Iterable[ReplicaChoice],
    expired: Callable[[], bool],
) -> list[Plan]:
    makers = ReplicaPlans(profile, cluster, request, assumptions_of(profile, cluster))
    judge = _Judge(profile, cluster, request)
    for choice in choices:
        if judge.has_enough or (judge.found and expired()):
            break
        judge.consider(makers.plan(choice))
    bound_s = _work_s(profile, cluster, request)
    return [replace(plan, search=_search(plan, bound_s)) for plan in judge.ranked()]


def _choices(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Callable[[], bool]
) -> Iterator[ReplicaChoice]:
    """The proposals in every way that is allowed, as far as a stage has replicas."""
    states = States.of(profile)
    sizes = tuple(micro_batch_sizes(request, MICRO_BATCHES_PER_RANK * cluster.ranks))
    wanted = HybridRequest(request.batch_size, sizes, keep=PROPOSALS)
    limit = inf if request.memory_limit_bytes is None else float(request.memory_limit_bytes)
    rules = ClusterRules(cluster, limit, baseline_bytes(profile))
    for proposal in hybrid_plans(profile, states, rules, wanted, expired):
        if max(proposal.replicas) > 1 and request.stages in (None, len(proposal.ranks)):
            members = tuple(tuple(states.between(*ends)) for ends in pairwise(proposal.cuts))
            for replication in request.replications:
                for size in _sizes(proposal, replication, request):
                    proposed = (proposal.warm_up,) if replication is Replication.SPLIT else ()
                    orders = _orders(proposal.replicas, replication, size, request, proposed)
                    for schedule, warm_up in orders:
                        yield ReplicaChoice(
                            members, proposal.ranks, size, replication, schedule, warm_up
                        )


def _sizes(proposal: HybridPlan, replication: Replication, request: PlanRequest) -> list[int]:
    size = proposal.micro_batch_size
    if replication is Replication.SPLIT or request.micro_batches is not None:
        return [size]
    return sorted({ceil(size / count) for count in proposal.replicas}, reverse=True)


def _orders(
    replicas: Sequence[int],
    replication: Replication,
    size: int,
    request: PlanRequest,
    proposed: Sequence[tuple[int, ...]] = (),
) -> list[tuple[str, tuple[int, ...]]]:
    """Schedules and warm-ups, without duplicates.

    Args:
        proposed: further warm-ups of 1F1B.
    """
    stages, count = len(replicas), ceil(request.batch_size / size)
    if replication is Replication.SPLIT:
        replicas = (1,) * stages
    found = [
        *((ONE_F_ONE_B, warm_up) for warm_up in proposed),
        (ONE_F_ONE_B, policy_a(stages, count, replicas)),
        (ONE_F_ONE_B, policy_b(stages, count, replicas)),
        (GPIPE, gpipe_warm_up(stages, count)),
    ]
    allowed = [pair for pair in found if request.schedule in (None, pair[0])]
    return list({depth: (name, depth) for name, depth in reversed(allowed)}.values())[::-1]


class _Judge:
    """Simulates plans, as many as it can afford."""

    def __init__(self, profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
        self._cluster = cluster
        self._limit_bytes = request.memory_limit_bytes
        self._baseline_bytes = baseline_bytes(profile)
        self._actions = 0
        self.found: list[Plan] = []

    @property
    def has_enough(self) -> bool:
        """Whether something was found, with all the effort that is allowed."""
        return self._actions > MOST_ACTIONS and bool(self.found)

    def consider(self, plan: Plan) -> None:
        """Keep a plan if it fits."""
        self._actions += 2 * plan.micro_batches * len(plan.stages)
        simulation = simulate(plan, self._cluster, process_baseline_bytes=self._baseline_bytes)
        peaks = enumerate(simulation.peak_memory_bytes)
        if all(peak <= self._limit_of(rank) for rank, peak in peaks):
            self.found.append(replace(plan, prediction=simulation.prediction))

    def ranked(self) -> list[Plan]:
        """The best plan of every shape, the fastest first."""
        shapes: dict[object, Plan] = {}
        for plan in sorted(self.found, key=_preference):
            replicas = tuple(stage.replicas for stage in plan.stages)
            shapes.setdefault((replicas, plan.micro_batches, plan.replication), plan)
        return list(shapes.values())

    def _limit_of(self, rank: int) -> float:
        limits = (self._limit_bytes, self._cluster.device(rank).memory_bytes)
        return min((limit for limit in limits if limit is not None), default=inf)


def _preference(plan: Plan) -> tuple[float, int, int, int]:
    return step_time_s(plan), len(plan.stages), sum(plan.warm_up), plan.micro_batches


def step_time_s(plan: Plan) -> float:
    """The predicted step of a plan that has a prediction."""
    assert plan.prediction is not None
    return plan.prediction.step_time_s


def _work_s(profile: Profile, cluster: Cluster, request: PlanRequest) -> float:
    """All work of a step, at the size at which a sample takes least, spread over all devices."""
    speed = sum(cluster.device(rank).speed for rank in range(cluster.ranks))
    sizes = micro_batch_sizes(request, request.batch_size)
    slices = {ceil(size / count) for size in sizes for count in range(1, cluster.ranks + 1)}
    samples_s = (
        sum(map(sum, operator_times(profile, size).cached)) / size for size in sorted(slices)
    )
    return min(samples_s) * request.batch_size / speed


def _search(plan: Plan, bound_s: float) -> Search:
    """What is known of how good a plan is: of its step, nothing but the work there is."""
    load_s = max(
        (stage.cost.forward_s + stage.cost.backward_s) / stage.replicas for stage in plan.stages
    )
    return Search(
        planner=PLANNER,
        max_stage_load_s=load_s,
        lower_bound_s=bound_s / plan.micro_batches,
        exact=False,
        planning_s=0.0,
        step_lower_bound_s=bound_s,
        gap=step_time_s(plan) / bound_s - 1 if bound_s else None,
    )
