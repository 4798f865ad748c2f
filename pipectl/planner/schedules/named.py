"""Plans for schedules that say which stages a rank holds, or that split backwards.

:func:`named_plan` makes that of a named schedule or of a user's own, :func:`every_schedule`
proposes plans of all of them if none is named.

Stages are cut for balance on the devices of the ranks that they lie on: round, for interleaved 1F1B
and looped breadth-first, in a V for ZB-V and DualPipeV, one per rank for ZB-H1. Few micro-batches
suffice, as these schedules shorten start and end; several numbers are simulated. If none of these
plans fits, stages are cut once more: for balance within the memory that the other stages of their
rank leave them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan, Search
from pipectl.planner.activations.modes import ModeSearch
from pipectl.planner.areas import even_partition
from pipectl.planner.bounds import work_s
from pipectl.planner.costs.devices import Mix, mixes, one_each, placements
from pipectl.planner.costs.stage_costs import with_halves
from pipectl.planner.evaluate import PLANNER, TIE, Evaluator, largest_stage_load_s, out_of_time
from pipectl.planner.partition.cut_space import CutSpace
from pipectl.planner.partition.cutter import Bound, CutRequest, Cutter, cut_request
from pipectl.planner.partition.layout import Choice, Layout, Members
from pipectl.planner.problem import Problem
from pipectl.planner.request import PLACED, Order, PlanRequest, micro_batch_sizes
from pipectl.profile import Profile
from pipectl.schedule import SCHEDULES
from pipectl.schedule.listed import Listed
from pipectl.schedule.order import Placement, Schedule, Shape
from pipectl.units import format_bytes

MICRO_BATCHES_PER_RANK = (1, 2, 4, 8)
"""Numbers to try where it is open."""
MAX_ACTIONS = 150_000
"""Forwards and backwards of a step; longer ones, which these schedules help least, are not tried if
the schedule is open."""
MAX_CUTS_FOR_MEMORY = 4
"""Times that the stages of a plan are cut again, each time by what the last plan held."""
PLACED_GAIN = 0.01
"""By which share a step with several stages per rank must be faster if the schedule is open. It has
more messages, and smaller gains are less than what predictions are off by."""
SPLIT_GAIN = 0.08
"""By which share a step with split backwards must be faster if the schedule is open. No profile
says what the halves take: ZB-H1 was measured 8 % slower than predicted (docs/benchmarks.md)."""


def pipeline_sizes(request: PlanRequest, ranks: int, counts: Sequence[int]) -> list[int]:
    """Micro-batch sizes to try for a pipeline of so many ranks, the largest first.

    Args:
        counts: micro-batches per rank, if the request does not say how many there are.
    """
    if request.micro_batches is not None:
        return micro_batch_sizes(request, request.batch_size)
    return sorted({ceil(request.batch_size / (count * ranks)) for count in counts}, reverse=True)


def layouts_for(
    problem: Problem, cutter: Cutter, ranks: Sequence[int], size: int, *, fixed: bool = True
) -> list[Layout]:
    """Stages with the smallest bottleneck, whatever they hold; none if time is up.

    Args:
        ranks: of every stage; several may be the same.
        size: samples of a micro-batch.
        fixed: whether stages lie on these ranks, or on any that suit them.
    """
    devices, count = problem.devices, len(ranks)
    again = (True,) * count if problem.request.recompute else ()
    if fixed:
        kind_of = {rank: kind for kind, pool in enumerate(devices) for rank in pool.ranks}
        ways = [Mix.ordered([kind_of[rank] for rank in ranks], len(devices))]
    else:
        ways = mixes(devices, len(problem.graph) + 1, count, count)
    layouts: dict[Layout, None] = {}
    with suppress(OutOfTimeError):
        for mix in ways:
            for cut in cutter.balanced(CutRequest(size, (1,) * count, mix, (inf,) * len(devices))):
                places = [tuple(ranks)]
                if not fixed:
                    places = placements(problem.cluster, devices, cut.kinds)
                layouts |= {Layout(cut.partition, one_each(p), again): None for p in places}
    return list(layouts)


def every_schedule(
    problem: Problem, cutter: Cutter, known: Sequence[Plan], *, splits_backward: bool
) -> Iterator[Plan]:
    """Plans without predictions for all schedules of this module, if the request leaves it open.

    The stages of a rank share its speed, so stages are cut for the devices of their ranks, and for
    the micro-batch size of the best plan. With one stage per rank they are those of that plan.

    Args:
        known: plans of other schedules, the best first, or none.
        splits_backward: of the schedules to propose.
    """
    ranks, request = problem.cluster.ranks, problem.request
    if ranks == 1 or request.warm_up is not None or request.schedule is not None:
        return
    cuts: dict[tuple[int, ...], list[Layout]] = {}
    straight = [
        (problem.members_of_plan(plan), plan.stages, plan.micro_batch_size)
        for plan in known[:1]
        if all(stage.replicas == 1 for stage in plan.stages)
    ]
    sizes = pipeline_sizes(request, ranks, MICRO_BATCHES_PER_RANK)
    if request.micro_batches is None:
        sizes = list(dict.fromkeys([*(plan.micro_batch_size for plan in known[:1]), *sizes]))
    for name in PLACED:
        schedule = SCHEDULES[name]
        if not schedule.flushes or schedule.splits_backward != splits_backward:
            continue
        layouts: Iterator[tuple[Members, Sequence[int], int]] = (
            (members, [stage.ranks[0] for stage in stages], size)
            for members, stages, size in straight
        )
        if schedule.placement is not Placement.STRAIGHT:
            layouts = _several_stages(problem, cutter, schedule, sizes, cuts)
        for members, places, size in layouts:
            count = problem.micro_batches(size)
            if 2 * len(members) * count <= MAX_ACTIONS:
                held = tuple((rank,) for rank in places)
                for warm_up in schedule.warm_ups(Shape(len(members), len(set(places)), count)):
                    plan = problem.plan(Choice(members, held, size, name, warm_up))
                    yield with_halves(plan, problem.profile)


def _several_stages(
    problem: Problem,
    cutter: Cutter,
    schedule: Schedule,
    sizes: Sequence[int],
    cuts: dict[tuple[int, ...], list[Layout]],
) -> Iterator[tuple[Members, Sequence[int], int]]:
    """Several stages on every rank, with their ranks and micro-batch sizes.

    Args:
        sizes: to try, the first one to cut for.
        cuts: for that size by the ranks of all stages, known from other schedules.
    """
    ranks, asked = problem.cluster.ranks, problem.request.stages
    for chunks in schedule.stages_per_rank:
        stages = chunks * ranks
        if asked in (None, stages) and stages <= len(problem.graph):
            places = schedule.placement.ranks(stages, ranks)
            assert places is not None
            if places not in cuts:
                cuts[places] = layouts_for(problem, cutter, places, sizes[0])
            for layout in cuts[places]:
                for size in sizes:
                    yield problem.members(layout.partition), places, size


def named_plan(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Callable[[], bool]
) -> Plan:
    """The fastest plan found that fits into memory.

    Args:
        request: with a schedule of this module, or with lists, which say how many stages there are,
            on which ranks, in which order: what is left is where to cut.
        expired: once it is true, what was found so far is good enough.

    Raises:
        InfeasibleError: the stages do not suit the ranks, there are too few ranks or micro-batches
            for the lists, or nothing fits.
    """
    listed, problem = request.listed, Problem(profile, cluster, request)
    if listed is None:
        places = _places(request, cluster.ranks, len(problem.graph))
        sizes = pipeline_sizes(request, len(set(places)), MICRO_BATCHES_PER_RANK)
    else:
        places, sizes = list(listed.rank_of_stage), [_size_of_lists(listed, request, cluster)]

    def check() -> None:
        if expired():
            raise out_of_time()

    schedule = None if listed is not None else SCHEDULES[request.schedule or ""]
    fixed = schedule is None or schedule.placement is not Placement.STRAIGHT
    cutter = Cutter(problem, CutSpace.plain(problem.graph), check)
    evaluator = Evaluator(problem, expired)
    plans: list[Plan] = []
    for size in sizes:
        if expired() and any(map(evaluator.fits, plans)):
            break
        layouts = layouts_for(problem, cutter, places, size, fixed=fixed)
        if not layouts:
            cut = even_partition(problem, len(places), size)
            again = (True,) * len(places) if request.recompute else ()
            layouts = [Layout(cut, one_each(tuple(places)), again)]
        search = _search(problem, cutter, places, size, finished=not expired())
        for layout in layouts:
            for plan in _in_order(problem, layout, size):
                tried = evaluator.run(with_halves(plan, profile))
                plans.append(replace(tried, search=search))
    others: list[Plan] = []
    if not any(map(evaluator.fits, plans)):
        others = _cut_for_memory(plans, cutter, evaluator)
    return fastest_that_fits(plans, evaluator, others)


def _cut_for_memory(plans: Sequence[Plan], cutter: Cutter, evaluator: Evaluator) -> list[Plan]:
    """The plan that exceeds its limits least, with other stages on the same ranks.

    Stages are cut for balance within limits of their own. These share out the limit of a rank among
    its stages as the last plan did, and allow for what only a simulation shows.

    Args:
        plans: with predictions; none fits.

    Returns:
        Plans with predictions, the last of which may fit.
    """
    problem, request = evaluator.problem, evaluator.problem.request
    kind_of = {rank: kind for kind, pool in enumerate(problem.devices) for rank in pool.ranks}
    last = min(plans, key=lambda plan: excess_bytes(plan, problem))
    count, size, order = len(last.stages), last.micro_batch_size, (last.schedule, last.warm_up)
    ranks = tuple(stage.ranks for stage in last.stages)
    mix = Mix.ordered([kind_of[rank] for (rank,) in ranks], len(problem.devices))
    may_recompute, again = request.recompute is not False, (True,) * count
    others: list[Plan] = []
    with suppress(OutOfTimeError):
        for _ in range(MAX_CUTS_FOR_MEMORY):
            wanted = replace(
                cut_request(problem, size, last.warm_up, mix, recompute=may_recompute),
                reserved_bytes=_reserved_bytes(last, problem),
            )
            tried = []
            for cut in cutter.balanced(wanted) or cutter.smallest_peak(wanted):
                if evaluator.is_exhausted:
                    break
                recompute = again if request.recompute else cut.recompute
                layout = Layout(cut.partition, ranks, recompute)
                plan = problem.plan(problem.choice(layout, size, order))
                plan = replace(plan, actions=last.actions, assumptions=last.assumptions)
                plan = evaluator.run(with_halves(plan, problem.profile))
                tried.append(replace(plan, search=last.search))
            if not tried:
                break
            others += tried
            before, last = last, min(tried, key=lambda plan: excess_bytes(plan, problem))
            if evaluator.fits(last) or excess_bytes(last, problem) >= excess_bytes(before, problem):
                break
    return others


def _reserved_bytes(plan: Plan, problem: Problem) -> tuple[float, ...]:
    """What every stage leaves to the others of its rank, and to what no stage is known to hold, if
    all that the ranks hold grows or shrinks to their limits."""
    assert plan.prediction is not None
    peaks, baseline = plan.prediction.peak_memory_bytes, problem.baseline_bytes
    reserved = []
    for stage, flying in zip(plan.stages, plan.warm_up, strict=True):
        (rank,), cost = stage.ranks, stage.cost
        limit = problem.limit_bytes(rank)
        held = cost.resident_bytes + cost.accumulated_bytes + flying * stage.kept_bytes
        held += stage.recompute * cost.saved_bytes
        share = held / max(1, peaks[rank] - baseline)
        reserved.append((limit - baseline) * (1 - share) if limit < inf else 0.0)
    return tuple(reserved)


def _in_order(problem: Problem, layout: Layout, size: int) -> Iterator[Plan]:
    """The stages in every order that is asked for."""
    request, listed = problem.request, problem.request.listed
    if listed is not None:
        plan = problem.plan(problem.choice(layout, size, (listed.name, listed.warm_up)))
        assumptions = *plan.assumptions, *notices(listed)
        yield replace(plan, actions=listed.text, assumptions=assumptions)
        return
    assert request.schedule is not None
    ranks = len(set(layout.ranks))
    for order in placed_orders(
        request.schedule, len(layout.ranks), ranks, request, problem.micro_batches(size)
    ):
        yield problem.plan(problem.choice(layout, size, order))


def _search(
    problem: Problem, cutter: Cutter, places: Sequence[int], size: int, *, finished: bool
) -> Search:
    """What is known of the largest stage of such plans."""
    speeds = sorted((problem.cluster.device(rank).speed for rank in places), reverse=True)
    least = problem.block_times(size, cached=True)
    bound = Bound(max(sum(least) / sum(speeds), max(least) / speeds[0]), False)
    if len(problem.devices) == 1:
        with suppress(OutOfTimeError):
            bound = cutter.bound(len(places), size, [Mix.ordered([0] * len(places), 1)], speeds)
    return Search(
        PLANNER, bound.load_s, bound.load_s, bound.exact, planning_s=0.0, finished=finished
    )


def _size_of_lists(listed: Listed, request: PlanRequest, cluster: Cluster) -> int:
    """Samples of a micro-batch.

    Raises:
        InfeasibleError: the batch cannot be cut into as many as the lists have, or there are too
            few ranks.
    """
    size = ceil(request.batch_size / listed.micro_batches)
    if ceil(request.batch_size / size) != listed.micro_batches:
        raise InfeasibleError(
            f"no feasible plan: schedule {listed.name} has {listed.micro_batches} micro-batches, "
            f"into which a batch of {request.batch_size} cannot be divided",
            cure="change the schedule, or training.batch_size: best is a multiple",
        )
    if len(listed.ranks) > cluster.ranks:
        raise InfeasibleError(
            f"no feasible plan: schedule {listed.name} has {len(listed.ranks)} ranks, "
            f"but there are {cluster.ranks}",
            cure="use more ranks, or a schedule for fewer",
        )
    return size


def notices(listed: Listed) -> tuple[str, ...]:
    """What changes with the lists besides time and memory."""
    stages = listed.unordered_stages()
    if not stages:
        return ()
    return (
        f"{listed.name} adds up the gradients of stage {stages[0]}"
        f"{f' and {len(stages) - 1} more' if stages[1:] else ''} in another order than by "
        "micro-batch: results equal those of other schedules within rounding, not to the bit",
    )


def _places(request: PlanRequest, ranks: int, blocks: int) -> list[int]:
    """The rank of every stage.

    Args:
        blocks: that the graph can be cut into.

    Raises:
        InfeasibleError: that number of stages has no place in the schedule.
    """
    assert request.schedule is not None
    fixed, schedule = request.fixed_stages, SCHEDULES[request.schedule]
    placement, chunks = schedule.placement, schedule.stages_per_rank[0]
    stages = fixed or min(chunks * ranks, blocks)
    if fixed is None and placement is Placement.V_SHAPED:
        stages -= stages % 2
    elif fixed is None:
        stages -= stages % min(ranks, stages)
    places = placement.fit(stages, ranks)
    if places is None:
        suitable = {
            Placement.STRAIGHT: f"{ranks}",
            Placement.ROUND: f"a multiple of {min(stages, ranks)}",
            Placement.V_SHAPED: f"{2 * ranks}",
        }
        raise InfeasibleError(
            f"no feasible plan: {placement.misfit(stages, ranks)}",
            cure=f"set pipeline.stages to {suitable[placement]}, or to auto",
        )
    return list(places)


def placed_orders(
    schedule: str,
    stages: int,
    ranks: int,
    request: PlanRequest,
    micro_batches: int,
    replicas: tuple[int, ...] | None = None,
) -> list[Order]:
    """Orders to try with one of these schedules.

    Args:
        ranks: over which the stages lie.
        replicas: of every stage, if they take whole micro-batches in turn.
    """
    warm_ups = SCHEDULES[schedule].warm_ups(Shape(stages, ranks, micro_batches, replicas))
    if request.warm_up is not None:
        warm_ups = [request.warm_up]
    depths = (tuple(min(depth, micro_batches) for depth in each) for each in warm_ups)
    return [(schedule, warm_up) for warm_up in dict.fromkeys(depths)]


def fastest_that_fits(
    plans: Sequence[Plan], evaluator: Evaluator, cut_for_memory: Sequence[Plan] = ()
) -> Plan:
    """The fastest that fits, with bounds of its own step: its stages were cut for a longer one.

    Args:
        plans: with predictions; if none fits, stages do without what they save where they may.
        cut_for_memory: more of them, for the case that none of ``plans`` fits.

    Raises:
        InfeasibleError: none does.
        OutOfTimeError: none of those does that were found in time.
    """
    problem, request = evaluator.problem, evaluator.problem.request
    modes = ModeSearch(evaluator, (bool(request.offload),))
    fitting = [plan for plan in plans if evaluator.fits(plan)]
    if not fitting:
        plans = [*plans, *cut_for_memory]
        fitting = [held for plan in plans if (held := modes.within_memory(plan))]
    if not fitting and evaluator.time_is_up:
        raise out_of_time()
    if not fitting:
        least = min(excess_bytes(plan, problem) for plan in plans)
        raise InfeasibleError(
            f"no feasible plan: schedule {plans[0].schedule} needs {format_bytes(round(least))} "
            "more than the memory limit of a rank",
            cure="set pipeline.schedule to auto, use more ranks, or raise the limit",
        )
    chosen = min(fitting, key=lambda plan: plan.predicted_step_s)
    assert chosen.search is not None
    load_s, known = largest_stage_load_s(chosen, problem.cluster), chosen.search
    exact = known.exact and load_s <= known.max_stage_load_s * (1 + TIE)
    search = replace(known, max_stage_load_s=load_s, exact=exact)
    sizes = [plan.micro_batch_size for plan in plans]
    bound_s = work_s(problem.profile, problem.cluster, request, sizes)
    return replace(
        chosen,
        memory_limit_bytes=request.memory_limit_bytes,
        search=search.bounded(chosen.predicted_step_s, bound_s),
    )


def excess_bytes(plan: Plan, problem: Problem) -> float:
    """The most that a rank holds beyond its limit."""
    assert plan.prediction is not None
    return max(
        peak - problem.limit_bytes(rank)
        for rank, peak in enumerate(plan.prediction.peak_memory_bytes)
    )
