"""How the best plan is found. Read this page first.

A plan says which operators form a stage, which ranks compute it, how many samples a micro-batch
has, in which order ranks work, and what each stage does with the values that its backward needs.
Every search takes the same seven steps, and each step makes one type from the one before:

    step      makes                                                        in
    blocks    BlockGraph: operators that must share a stage are one        graph/blocks
    cuts      CutSpace: the sets of blocks that a stage may end at         graph/downsets
    costs     ModelCosts, Pool: of blocks and partitions; devices by kind  costs/
    propose   Area, Cut, Layout: stages on kinds of devices, then ranks    areas, partition/
    estimate  Candidate: a layout, size and order with a step by formula   candidates, partition/
    improve   Candidate: borders, ranks and replicas moved                 improve, partition/layout
    judge     Plan with its simulated step, kept if it fits                judge, plans, evaluator

A :class:`~pipectl.planner.problem.Problem` holds the first three for a model, a cluster and a
request; problems of one model share them. A :class:`~pipectl.planner.judge.Judge` keeps the plans
of a problem that fit and says which is best; there is one rule for ties. Proposals are tried in the
order of their estimates or lower bounds, until none can be better than the best plan. The time is
looked at by ``expired``, and nothing here tells what it does: progress is for the callers.

Searches differ in what they propose. The later ones start from the plans of the earlier:

    search_plans
      named_plan     named        a user's lists, or a schedule whose steps overlap
      plain_plans    plain        1F1B and GPipe, in one of three ways:
        explore        explorer     one loop; if replicas are open, first with several ranks per
                                    stage, then with one
        copies         plain        one copy of a pipeline by plain_plans, then all copies together
        named_plan     named        if another schedule is named
      varied_plans   variants     for most jobs: plain_plans, then what is derived from these: other
                                  orders, other schedules, offload, segments, PipeFB (modes,
                                  other_schedules, segments)

If memory is short, ``varied_plans`` starts from two searches: without the limits, because a stage
may later offload or recompute what it has too much, and within them, because the memory of a stage
decides where to cut. If nothing fits, :mod:`pipectl.planner.infeasible` says what is missing.

What would change if: a schedule is added: nothing here, see :mod:`pipectl.schedule.registry`. The
cost of a stage changes: ``costs/``, and the tables of the dynamic programme. A new way to save
memory: a mode in :mod:`pipectl.planner.modes`. Another kind of parallelism: a dimension of
``Layout``, with moves and an estimate.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError
from pipectl.plan import Plan
from pipectl.planner.named import named_plan
from pipectl.planner.plain import plain_plans
from pipectl.planner.problem import Problem
from pipectl.planner.request import Expired, PlanRequest
from pipectl.planner.variants import varied_plans
from pipectl.profile import Profile
from pipectl.schedule import SCHEDULES

MAX_ALTERNATIVES = 5
"""Number of plans besides the best."""


def make_plan(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Expired = lambda: False,
) -> Plan:
    """The fastest simulated plan that fits into memory, with its prediction.

    Args:
        expired: called repeatedly; once it returns true, the best plan so far is returned, or an
            even cut if there is none.

    Raises:
        InfeasibleError: nothing fits; says how much is missing and what would help.
        OutOfTimeError: time was up before any plan was found, and even cuts do not fit.
    """
    return search_plans(profile, cluster, request, expired, alternatives=0)[0]


def search_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Expired = lambda: False,
    *,
    alternatives: int = MAX_ALTERNATIVES,
) -> list[Plan]:
    """The plan of :func:`make_plan`, then at most ``alternatives`` of the next best.

    These differ from it and from each other in more than their cuts, and are sorted by their steps.
    """
    started_s = perf_counter()
    problem = Problem(profile, cluster, request)
    _refuse_own_code(problem)
    schedule = SCHEDULES.get(request.schedule or "")
    if request.listed is not None or (schedule is not None and not schedule.flushes):
        plans = [named_plan(problem, expired)]
    elif request.has_variants:  # a job leaves schedules, offload and blocks open by default
        plans = varied_plans(problem, expired)[: 1 + alternatives]
    else:
        plans = plain_plans(problem, expired, alternatives)
    best = plans[0]
    if best.search is not None:
        planning_s = perf_counter() - started_s
        best = replace(best, search=replace(best.search, planning_s=planning_s))
    return [best, *plans[1:]]


def _refuse_own_code(problem: Problem) -> None:
    """Raise if all backwards are asked for on other ranks, and a stage can have none there."""
    request, profile = problem.request, problem.profile
    if request.backward_apart and request.recompute is False and profile.own_code:
        name = profile.by_id[profile.own_code[0]].name
        raise InfeasibleError(
            f"no feasible plan: {name} runs code of its own, which another rank can follow only if "
            "it computes the forward again",
            hint="write pipeline.recompute: auto, or pipeline.backward: together",
        )
