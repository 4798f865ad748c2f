"""The search for the best plan with one rank a stage.

Everything that can be tried waits in one queue, by the least its step can take:

- an *area*: a number of stages and a micro-batch size. It becomes candidates: good partitions
  from the dynamic programme (all there are, if they are few) with every schedule, warm-up and
  placement.
- a *candidate*, known by its bound: the time of its step by the recurrence. The judge simulates it,
  or finds that it does not fit into memory.
- a *fit*: what did not fit is cut once more, for the memory limit, in a later turn.

The first candidate is made better before it is simulated: its stages are cut anew if its
micro-batch size is not the one they were cut for, and their borders move while that lowers its
bound. When nothing left in the queue can beat the best, the borders of the best move once more,
while that makes its simulated step shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pipectl.cluster import Cluster
from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan, Search
from pipectl.planner.exploring.candidates import Candidate
from pipectl.planner.exploring.explorer import Explorer
from pipectl.planner.exploring.first_plan import first_choices
from pipectl.planner.exploring.infeasible import infeasible, least_demanding
from pipectl.planner.exploring.judge import Verdict
from pipectl.planner.graph.blocks import BlockGraph, condense
from pipectl.planner.judge import PLANNER, largest_load_s, out_of_time
from pipectl.planner.partition.cut_space import CutSpace
from pipectl.planner.partition.cutter import Cutter
from pipectl.planner.partition.estimate import Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import Order, PlanRequest, stage_counts
from pipectl.profile import Profile


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
    return replace(verdict.plan, prediction=verdict.simulation.prediction, search=search)


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
    return search.bounded(found.simulation.step_time_s, least_s)


def _space(graph: BlockGraph, profile: Profile, stages: int) -> CutSpace:
    """What to search; small blocks stay apart if there would be too few for the stages."""
    space = CutSpace.of(graph, profile)
    return space if len(space.graph) >= stages else CutSpace.sample(graph)
