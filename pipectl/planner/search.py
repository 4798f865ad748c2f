"""The search for the best plan, with whatever the request allows.

With replicas, see :mod:`pipectl.planner.replicas`; with offload, backwards on other ranks or
several stages per rank, :mod:`pipectl.planner.variants`. With one rank per stage, everything that
can be tried waits in one queue, by the least its step can take:

- an *area*: a number of stages and a micro-batch size. It becomes candidates: good partitions
  from the dynamic programme (all there are, if they are few) with every schedule, warm-up and
  placement.
- a *candidate*, known by its estimate: the time of its step by the recurrence. The judge simulates
  it, or finds that it does not fit into memory.
- a *fit*: what did not fit is cut once more, for the memory limit, in a later turn.

The first candidate is made better before it is simulated: its stages are cut anew if its
micro-batch size is not the one they were cut for, and their borders move while that lowers its
estimate. When nothing left in the queue can beat the best, the borders of the best move once more,
while that makes its simulated step shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan, Search
from pipectl.planner.bounds import work_s
from pipectl.planner.explorer import Explorer, first_choices
from pipectl.planner.graph.blocks import BlockGraph, condense
from pipectl.planner.infeasible import infeasible, least_demanding
from pipectl.planner.judge import PLANNER, TIE, Candidate, Verdict, largest_load_s, out_of_time
from pipectl.planner.listed import listed_plan
from pipectl.planner.partition.cut_space import CutSpace
from pipectl.planner.partition.cutter import Cutter
from pipectl.planner.partition.estimate import Layout
from pipectl.planner.problem import Problem
from pipectl.planner.replicas import copied_plans, one_copy, replicated_plans
from pipectl.planner.request import PLACED, Order, PlanRequest, stage_counts
from pipectl.planner.schedules.several_stages import placed_plan
from pipectl.planner.unflushed import unflushed_plan
from pipectl.planner.variants import varied_plans
from pipectl.profile import Profile
from pipectl.schedule import SCHEDULES


def straight_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Callable[[], bool],
    alternatives: int,
) -> list[Plan]:
    """The best plan with one rank a stage, and the next best of other shapes, with predictions.

    Args:
        expired: asked now and then; once it is true, the search ends.
        alternatives: how many plans besides the best.

    Raises:
        InfeasibleError: nothing fits; says how much is missing and what would help.
        OutOfTimeError: time was over before any plan was found, and even cuts do not fit.
    """
    graph = condense(profile)
    counts = stage_counts(request, cluster.ranks, len(graph))
    space = _space(graph, profile, counts[-1])
    problem = Problem(profile, cluster, request, space.graph)
    check = _Deadline(expired).check
    explorer = Explorer(problem, space, counts, check)
    finished = _run(explorer)
    if explorer.judge.best() is None:
        if finished:
            _examine_least_demanding(explorer, Cutter(problem, space, check), counts)
        else:
            _examine(explorer, first_choices(problem, counts))
    best = explorer.judge.best()
    if best is None:
        raise out_of_time()
    others = explorer.alternatives(best, alternatives) if alternatives and finished else []
    least_s = explorer.least_step_s()
    return [
        _predicted(verdict, _search(explorer, verdict, least_s, finished=finished))
        for verdict in (best, *others)
    ]


def _examine(explorer: Explorer, found: Iterable[tuple[Layout, int, Order]]) -> None:
    problem = explorer.problem
    for layout, size, order in found:
        choice = problem.choice(layout, size, order)
        explorer.judge.examine(Candidate(choice, layout, problem.micro_batches(size), 0.0))


def _examine_least_demanding(explorer: Explorer, cutter: Cutter, counts: Sequence[int]) -> None:
    """The last resort of a search that has found nothing.

    Raises:
        InfeasibleError: it does not fit either.
        OutOfTimeError: time was over before it was found.
    """
    candidate, demand = least_demanding(explorer.problem, cutter, counts)
    _examine(explorer, [candidate])
    if explorer.judge.best() is None:
        raise infeasible(explorer.problem, cutter, demand)


class _Deadline:
    """Ends the search by an exception, wherever it is."""

    def __init__(self, expired: Callable[[], bool]) -> None:
        self._expired = expired

    def check(self) -> None:
        if self._expired():
            raise out_of_time()


def _run(explorer: Explorer) -> bool:
    """Whether the search came to its end."""
    try:
        explorer.run()
    except OutOfTimeError:
        return False
    return True


def _predicted(verdict: Verdict, search: Search) -> Plan:
    return replace(verdict.plan, search=search)


def _search(explorer: Explorer, found: Verdict, least_s: float, *, finished: bool) -> Search:
    """What is known of how good a plan is."""
    plan = found.plan
    bound = explorer.bound(len(plan.stages), plan.micro_batch_size, finished=finished)
    search = Search(
        planner=PLANNER,
        max_stage_load_s=largest_load_s(plan, explorer.problem.cluster),
        lower_bound_s=bound.load_s,
        exact=bound.exact,
        planning_s=0.0,
        finished=finished and not explorer.judge.gave_up,
    )
    return search.bounded(found.step_s, least_s)


def _space(graph: BlockGraph, profile: Profile, stages: int) -> CutSpace:
    """What to search; small blocks stay apart if there would be too few for the stages."""
    space = CutSpace.of(graph, profile)
    return space if len(space.graph) >= stages else CutSpace.sample(graph)


MOST_ALTERNATIVES = 5
Expired = Callable[[], bool]


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
    expired: Expired = lambda: False,
) -> Plan:
    """The fastest plan found by simulation that fits into memory, with its prediction.

    Args:
        expired: asked now and then; once it is true, the best plan so far is returned, or, where
            there is none, an even cut.

    Raises:
        InfeasibleError: nothing fits; says how much is missing and what would help.
        OutOfTimeError: time was over before any plan was found, and even cuts do not fit.
    """
    return _ranked(profile, cluster, request, expired, 0)[0]


def search_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Expired = lambda: False,
) -> Found:
    """As :func:`make_plan`, with the next best plans."""
    plan, *others = _ranked(profile, cluster, request, expired, MOST_ALTERNATIVES)
    return Found(plan, tuple(others[:MOST_ALTERNATIVES]))


def _ranked(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired, alternatives: int
) -> list[Plan]:
    """The best plan, and the next best."""
    started_s = perf_counter()
    if request.listed is not None:
        found = [listed_plan(make_plan, profile, cluster, request, expired)]
    elif request.schedule is not None and not SCHEDULES[request.schedule].flushes:
        found = [unflushed_plan(make_plan, profile, cluster, request, expired)]
    elif request.has_variants:
        found = varied_plans(_several, profile, cluster, request, expired)
    elif (request.replicas or 1) > 1:
        found = _copies(profile, cluster, request, request.replicas or 1, expired)
    elif request.schedule in PLACED:
        found = [placed_plan(make_plan, profile, cluster, request, expired)]
    elif request.replicas is None:
        found = _with_replicas(profile, cluster, request, expired)
    else:
        found = _one_rank_a_stage(profile, cluster, request, expired, alternatives)
    return [_timed(found[0], perf_counter() - started_s), *found[1:]]


def _copies(
    profile: Profile, cluster: Cluster, request: PlanRequest, copies: int, expired: Expired
) -> list[Plan]:
    """Plans in which every stage has as many replicas."""
    alone = _several(*one_copy(profile, cluster, request, copies), expired)
    return copied_plans(profile, cluster, request, alone, copies)


def _one_rank_a_stage(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired, alternatives: int
) -> list[Plan]:
    """Plans with one rank a stage; where memory is short, also with stages in blocks.

    Raises:
        InfeasibleError, OutOfTimeError: there is none.
    """
    reason: InfeasibleError | None = None
    found: list[Plan] = []
    try:
        found = straight_plans(profile, cluster, request, expired, alternatives)
    except InfeasibleError as error:
        if request.blocks is False:
            raise
        reason = error
    is_short = not found or any(stage.recompute for stage in found[0].stages)
    if request.blocks is None and is_short:
        with suppress(InfeasibleError, OutOfTimeError):
            in_blocks = varied_plans(_several, profile, cluster, request, expired)
            found = in_blocks if not found or _is_faster(in_blocks[0], found[0]) else found
    if reason is not None and not found:
        raise reason
    return found


def _is_faster(plan: Plan, other: Plan) -> bool:
    return plan.predicted_step_s < other.predicted_step_s * (1 - TIE)


def _several(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired
) -> list[Plan]:
    return _ranked(profile, cluster, request, expired, MOST_ALTERNATIVES)


def _with_replicas(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired
) -> list[Plan]:
    """Plans with and without replicas; of equals the ones without come first.

    What is proven of steps without replicas is not of those with.
    """
    found = replicated_plans(profile, cluster, request, expired)
    with suppress(*((InfeasibleError, OutOfTimeError) if found else ())):
        straight = _several(profile, cluster, replace(request, replicas=1), expired)
        bound_s = work_s(profile, cluster, request)
        found = [*(_bounded(plan, bound_s) for plan in straight), *found]
    return sorted(found, key=lambda plan: plan.predicted_step_s)


def _bounded(plan: Plan, bound_s: float) -> Plan:
    if plan.search is None:
        return plan
    return replace(plan, search=plan.search.bounded(plan.predicted_step_s, bound_s))


def _timed(plan: Plan, planning_s: float) -> Plan:
    if plan.search is None:
        return plan
    return replace(plan, search=replace(plan.search, planning_s=planning_s))
