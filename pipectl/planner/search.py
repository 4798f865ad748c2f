"""The search for the best plan.

Everything that can be tried waits in one queue, by the least its step can take:

- an *area*: a number of stages and a micro-batch size. It becomes candidates: good partitions
  from the dynamic programme (all there are, if they are few) with every schedule, warm-up and
  placement.
- a *candidate*. The judge simulates it, or finds that it does not fit into memory.
- a *fit*: what did not fit is cut once more, for the memory limit, in a later turn.

When nothing left in the queue can beat the best, stages are cut anew if its micro-batch size is not
the one they were cut for, and the borders of its stages move while that makes the step shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan, Search
from pipectl.planner.condense import Condensed, condense
from pipectl.planner.explorer import Explorer
from pipectl.planner.fitting import Fitter
from pipectl.planner.infeasible import infeasible
from pipectl.planner.interleaving import interleaved_plan
from pipectl.planner.judge import Verdict
from pipectl.planner.partition import Space
from pipectl.planner.problem import Problem, baseline_bytes
from pipectl.planner.proof import proven
from pipectl.planner.replicated import copied_plans, one_copy, replicated_plans, step_time_s
from pipectl.planner.request import PlanRequest, stage_counts
from pipectl.profile import Profile
from pipectl.schedule.interleaved import NAME as INTERLEAVED

PLANNER = "pipectl"
MOST_ALTERNATIVES = 5


@dataclass(frozen=True)
class Found:
    """The best plan, and the next best of other shapes.

    Args:
        alternatives: plans that differ in more than their cuts, with predictions, fastest first.
    """

    plan: Plan
    alternatives: tuple[Plan, ...] = ()


def make_plan(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Callable[[], bool] = lambda: False,
) -> Plan:
    """The fastest plan found by simulation that fits into memory, with its prediction.

    Args:
        expired: asked now and then; once it is true, the best plan so far is returned.

    Raises:
        InfeasibleError: nothing fits; says how much is missing and what would help.
        OutOfTimeError: time was over before any plan was found.
    """
    return search_plans(profile, cluster, request, expired).plan


def search_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Callable[[], bool] = lambda: False,
) -> Found:
    """As :func:`make_plan`, with the next best plans."""
    started_s = perf_counter()
    found = _searched(profile, cluster, request, expired)
    best = proven(found.plan, profile, cluster, request, expired)
    assert best.search is not None
    plan = replace(best, search=replace(best.search, planning_s=perf_counter() - started_s))
    others = (found.plan, *found.alternatives)
    return Found(plan, tuple(other for other in others if _shape(other) != _shape(plan)))


def _shape(plan: Plan) -> tuple[object, ...]:
    """What the next best plans differ in."""
    replicas = tuple(stage.replicas for stage in plan.stages)
    return replicas, plan.replication, plan.micro_batches, plan.schedule, plan.warm_up


def _searched(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Callable[[], bool]
) -> Found:
    """What the search finds, without proof."""
    if request.schedule == INTERLEAVED:
        baseline = baseline_bytes(profile)
        return Found(interleaved_plan(make_plan, profile, cluster, request, baseline))
    if request.replicas != 1:
        return _plans_with_replicas(profile, cluster, request, expired)
    started_s = perf_counter()
    graph = condense(profile)
    counts = stage_counts(request, cluster.ranks, len(graph))
    space = _space(graph, profile, counts[-1])
    problem = Problem(profile, cluster, request, space.graph)
    explorer = Explorer(problem, space, counts, _Deadline(expired).check)
    finished = _run(explorer)
    best = explorer.judge.best()
    if best is None:
        raise infeasible(problem, Fitter(problem), counts) if finished else _nothing_yet()
    others = explorer.judge.alternatives(MOST_ALTERNATIVES)
    search = _search(explorer, best, finished=finished)
    plan = replace(_predicted(best), search=replace(search, planning_s=perf_counter() - started_s))
    return Found(plan, tuple(map(_predicted, others)))


def _plans_with_replicas(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Callable[[], bool]
) -> Found:
    """The best plan with or, unless their number is fixed, without replicas; and the next best."""
    started_s = perf_counter()
    if request.replicas is None:
        found = replicated_plans(profile, cluster, request, expired)
        with suppress(*((InfeasibleError, OutOfTimeError) if found else ())):
            straight = _searched(profile, cluster, replace(request, replicas=1), expired)
            found = [straight.plan, *straight.alternatives, *found]
    else:
        alone = _searched(profile, *one_copy(cluster, request), expired)
        found = copied_plans(profile, cluster, request, [alone.plan, *alone.alternatives])
    if not found:
        raise InfeasibleError(
            f"no feasible plan: {request.replicas} replicas of every stage take too much memory",
            cure="use fewer replicas, so that every pipeline has more ranks",
        )
    # Of equals the first, without replicas; the next best of a search never replace its best.
    plan = min((one for one in found if one.search is not None), key=step_time_s)
    others = sorted((one for one in found if one is not plan), key=step_time_s)
    assert plan.search is not None
    search = replace(plan.search, planning_s=perf_counter() - started_s)
    return Found(replace(plan, search=search), tuple(others[:MOST_ALTERNATIVES]))


class _Deadline:
    """Ends the search by an exception, wherever it is."""

    def __init__(self, expired: Callable[[], bool]) -> None:
        self._expired = expired

    def check(self) -> None:
        if self._expired():
            raise _nothing_yet()


def _nothing_yet() -> OutOfTimeError:
    return OutOfTimeError("planning was ended before any plan was found", cure="allow more time")


def _run(explorer: Explorer) -> bool:
    """Whether the search came to its end."""
    try:
        explorer.run()
    except OutOfTimeError:
        return False
    return True


def _predicted(verdict: Verdict) -> Plan:
    return replace(verdict.plan, prediction=verdict.simulation.prediction)


def _search(explorer: Explorer, best: Verdict, *, finished: bool) -> Search:
    """What is known of how good the plan is."""
    plan = best.plan
    bound = explorer.bound(len(plan.stages), plan.micro_batch_size, finished=finished)
    least_s = explorer.least_step_s()
    return Search(
        planner=PLANNER,
        max_stage_load_s=_largest_load_s(plan, explorer.problem.cluster),
        lower_bound_s=bound.load_s,
        exact=bound.exact,
        planning_s=0.0,
        step_lower_bound_s=least_s,
        gap=best.simulation.step_time_s / least_s - 1 if least_s else 0.0,
        finished=finished and not explorer.judge.gave_up,
    )


def _space(graph: Condensed, profile: Profile, stages: int) -> Space:
    """What to search; small blocks stay apart if there would be too few for the stages."""
    space = Space.of(graph, profile)
    return space if len(space.graph) >= stages else Space.sample(graph)


def _largest_load_s(plan: Plan, cluster: Cluster) -> float:
    """Forward and backward of the most loaded stage on its device."""
    return max(
        (stage.cost.forward_s + stage.cost.backward_s) / cluster.device(stage.ranks[0]).speed
        for stage in plan.stages
    )
