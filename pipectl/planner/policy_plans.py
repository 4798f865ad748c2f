"""Plans with the stages, replicas and ranks that a planner of the literature chooses.

Such a planner takes the micro-batch as given, and says nothing about the order of the work. Both
are chosen here as for our own plans, by simulation, so that what differs is the planner's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil, inf

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan, Replication, Search, Stage
from pipectl.planner.costs import operator_times
from pipectl.planner.given_stages import GivenStages, Maker, predicted
from pipectl.planner.hybrid import ClusterRules
from pipectl.planner.other_clusters import with_ranks
from pipectl.planner.policies import POLICIES, Work, dapple, pipedream
from pipectl.planner.request import PlanRequest, micro_batch_sizes, warm_ups
from pipectl.profile import Profile
from pipectl.schedule.gpipe import NAME as GPIPE
from pipectl.schedule.interleaved import NAME as INTERLEAVED
from pipectl.schedule.one_f_one_b import NAME as ONE_F_ONE_B
from pipectl.schedule.one_f_one_b import policy_a, policy_b
from pipectl.units import format_bytes

_MICRO_BATCHES_PER_RANK = 4
_CURE = "leave it to the planner, or use --planner pipectl"
REPLICATING = {dapple.NAME: Replication.SPLIT, pipedream.NAME: Replication.WHOLE}
"""Policies whose stages may have replicas, and what these share: samples, or micro-batches."""


def policy_plan(
    name: str,
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Callable[[], bool] = lambda: False,
) -> Plan:
    """The fastest plan that fits with a policy's stages, over micro-batch sizes and schedules.

    How long it took is not in it: whoever has a clock fills it in.

    Args:
        name: of the policy.
        expired: asked before every simulation; once it is true, the best plan so far is returned.

    Raises:
        InfeasibleError: the policy cannot do what is asked, or does not fit: most of them do not
            consider memory.
        OutOfTimeError: time was over before there was any plan.
    """
    _check(name, request)
    best: Plan | None = None
    excess_bytes, finished = inf, True
    for plan in _plans(name, profile, cluster, request):
        found = predicted(plan, profile, cluster)
        over_bytes = _excess_bytes(found, cluster, request)
        excess_bytes = min(excess_bytes, over_bytes)
        if over_bytes <= 0 and (best is None or _step_s(found) < _step_s(best)):
            best = found
        if expired():
            finished = False
            break
    if best is None:
        raise _nothing(name, excess_bytes, request, finished=finished)
    return replace(best, search=_search(name, best, profile, cluster, finished=finished))


def _check(name: str, request: PlanRequest) -> None:
    if request.schedule == INTERLEAVED:
        raise InfeasibleError(f"no feasible plan: {name} gives every rank one stage", cure=_CURE)


def _plans(name: str, profile: Profile, cluster: Cluster, request: PlanRequest) -> Iterator[Plan]:
    """Every micro-batch size and schedule, without prediction; none with idle replicas."""
    makers: dict[GivenStages, Maker] = {}
    for size in micro_batch_sizes(request, _MICRO_BATCHES_PER_RANK * cluster.ranks):
        given = _given(name, profile, cluster, request, size)
        if _leaves_replicas_idle(given, size):
            continue
        if given not in makers:
            makers[given] = Maker(profile, cluster, request, given)
        for schedule, warm_up in _orders(request, given, ceil(request.batch_size / size)):
            yield makers[given].plan(size, schedule, warm_up)


def _leaves_replicas_idle(given: GivenStages, size: int) -> bool:
    """Whether a micro-batch has fewer samples than a stage has replicas that share it."""
    return given.replication is Replication.SPLIT and max(map(len, given.ranks)) > size


def _given(
    name: str, profile: Profile, cluster: Cluster, request: PlanRequest, size: int
) -> GivenStages:
    """What the policy chooses for a micro-batch size."""
    stages = request.fixed_stages
    if stages is not None and name not in REPLICATING:
        cluster = with_ranks(cluster, min(stages, cluster.ranks))
    found = POLICIES[name](profile, ClusterRules(cluster), Work(request.batch_size, size))
    if stages not in (None, len(found.ranks)):
        made = f"{name} makes {len(found.ranks)} stages here, not {stages}"
        raise InfeasibleError(f"no feasible plan: {made}", cure=_CURE)
    return GivenStages(found.nodes(profile), found.ranks, REPLICATING.get(name, Replication.WHOLE))


def _orders(
    request: PlanRequest, given: GivenStages, micro_batches: int
) -> Sequence[tuple[str, tuple[int, ...]]]:
    """Schedules and warm-ups to try."""
    stages = len(given.ranks)
    orders = warm_ups(request, stages, micro_batches)
    replicas = [len(ranks) for ranks in given.ranks]
    whole = given.replication is Replication.WHOLE and max(replicas) > 1
    if not whole or request.warm_up is not None:
        return orders
    deep = [(ONE_F_ONE_B, warm(stages, micro_batches, replicas)) for warm in (policy_a, policy_b)]
    found = [*(deep if request.schedule != GPIPE else []), *(o for o in orders if o[0] == GPIPE)]
    return list(dict.fromkeys(found))


def _excess_bytes(plan: Plan, cluster: Cluster, request: PlanRequest) -> float:
    """By how much the fullest rank is above its limit; at most 0 where all fit."""
    assert plan.prediction is not None
    excess = -inf
    for rank, peak in enumerate(plan.prediction.peak_memory_bytes):
        for limit in (request.memory_limit_bytes, cluster.device(rank).memory_bytes):
            excess = max(excess, -inf if limit is None else peak - limit)
    return excess


def _nothing(
    name: str, excess_bytes: float, request: PlanRequest, *, finished: bool
) -> InfeasibleError | OutOfTimeError:
    """The error where no plan fits."""
    if not finished:
        return OutOfTimeError(
            "planning was ended before any plan was found", cure="allow more time"
        )
    if excess_bytes == inf:
        return InfeasibleError(
            f"no feasible plan: {name} wants more replicas than a micro-batch has samples",
            cure=f"set {request.named('micro_batches')} lower, or use --planner pipectl",
        )
    return InfeasibleError(
        f"no feasible plan: the stages that {name} chooses need at least "
        f"{format_bytes(int(excess_bytes))} more than a rank may take; {name} does not look at it",
        cure=f"raise {request.named('memory_limit')}, or use --planner pipectl",
    )


def _search(name: str, plan: Plan, profile: Profile, cluster: Cluster, *, finished: bool) -> Search:
    """What is known of the stages: no partition has a smaller largest load than equal shares."""
    times = operator_times(profile, plan.micro_batch_size)
    work_s = sum(min(map(sum, pairs)) for pairs in zip(times.cached, times.uncached, strict=True))
    speed = sum(cluster.device(rank).speed for rank in range(cluster.ranks))
    return Search(
        planner=name,
        max_stage_load_s=max(_load_s(stage, cluster) for stage in plan.stages),
        lower_bound_s=work_s / speed,
        exact=False,
        planning_s=0.0,
        finished=finished,
    )


def _load_s(stage: Stage, cluster: Cluster) -> float:
    """Of a micro-batch, on replicas that work side by side."""
    slowest = min(cluster.device(rank).speed for rank in stage.ranks)
    return (stage.cost.forward_s + stage.cost.backward_s) / (stage.replicas * slowest)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s
