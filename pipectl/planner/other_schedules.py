"""Plans for the schedules besides 1F1B and GPipe, and for a user's own lists.

:func:`named_plan` plans a named schedule or a user's lists. If no schedule is named,
:func:`propose_other_schedules` proposes plans for all that keep the results of one rank.

Stages are cut for balance on the devices of their ranks. Interleaved 1F1B and looped breadth-first
place them round-robin, ZB-V and DualPipeV in a V, ZB-H1 and schedules without flushes one per rank;
for the last, several numbers of stages are tried. A few micro-batches suffice, because these
schedules shorten fill and drain; several numbers are simulated. If none of these plans fits, stages
are cut again, within the memory that the other stages of their rank leave free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.bounds import least_step_s, with_findings, work_bound_s
from pipectl.planner.costs.devices import Mix, one_each
from pipectl.planner.graph.downsets import CutSpace
from pipectl.planner.judge import out_of_time, preference
from pipectl.planner.modes import Shortlist
from pipectl.planner.partition.cutter import Cutter, cut_request, layouts_of, merged
from pipectl.planner.partition.layout import Choice, Layout, Ranks, ranks_with_backwards
from pipectl.planner.problem import Problem
from pipectl.planner.request import (
    OTHER_SCHEDULES,
    Order,
    PlanRequest,
    accepted,
    check_cuts,
    choices,
    micro_batch_sizes,
    stage_counts,
)
from pipectl.planner.simple import even_partition
from pipectl.profile import Profile
from pipectl.schedule import SCHEDULES, default_warm_up
from pipectl.schedule.listed import Listed
from pipectl.schedule.order import Placement, Schedule, Shape
from pipectl.units import format_bytes

PIPELINE_MICRO_BATCHES = (1, 2, 4, 8)
"""Numbers per rank to try if the request leaves it open."""
MAX_ACTIONS_PER_STEP = 150_000
"""Forwards and backwards of a step. Longer steps gain least from these schedules, and are not tried
if the schedule is open."""
MAX_CUTS_FOR_EVERY_SIZE = 1000
"""If a graph has more cuts, stages of an open schedule are cut for one micro-batch size."""
MAX_LAYOUTS = 8
"""Layouts to try per open schedule, number of stages and micro-batch size: those with the least
bounds in the first order."""
MAX_CUTS_FOR_MEMORY = 4
"""How often the stages of a plan are cut again, each time by the memory of the last plan."""
SEVERAL_STAGES_GAIN = 0.01
"""Share by which a step with several stages per rank must be faster if the schedule is open. It has
more messages, and smaller gains are below the error of predictions."""
SPLIT_GAIN, UNMEASURED_SPLIT_GAIN = 0.02, 0.08
"""Shares by which a step with split backwards must be faster if the schedule is open: if the
profile has the times of the halves, and if half of the backward is assumed for each."""


def named_plan(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Callable[[], bool]
) -> Plan:
    """The fastest plan found that fits into memory.

    Args:
        request: names a schedule of this module, or has lists. Lists fix the number of stages,
            their ranks and their order, so only the cuts are open.
        expired: once it returns true, the best plan so far is returned.

    Raises:
        InfeasibleError: the number of stages does not suit the ranks, there are too few ranks or
            micro-batches for the lists, or nothing fits.
        OutOfTimeError: no plan that fits was found in time.
    """
    problem = Problem(profile, cluster, request)
    cutter = Cutter(problem, CutSpace.plain(problem.graph), expired)
    shortlist = Shortlist(problem, expired, choices(request.offload))
    for places, size in _pipelines(problem):
        shortlist.consider(_proposals(problem, cutter, places, size))
    closest = shortlist.closest
    assert closest is not None
    # Stages cut for memory keep what they save, or recompute all of it.
    may_cut = not (request.backward_apart or request.offload or request.blocks)
    if may_cut and problem.excess_bytes(closest) > 0:
        shortlist.settle(_cut_for_memory(closest, cutter, shortlist))
    if not shortlist.plans and expired():
        raise out_of_time()
    if not shortlist.plans:
        missing = format_bytes(round(problem.excess_bytes(closest)))
        raise InfeasibleError(
            f"no feasible plan: schedule {closest.schedule} needs {missing} "
            "more than the memory limit of a rank",
            cure="set pipeline.schedule to auto, use more ranks, or raise the limit",
        )
    plan = min(shortlist.plans, key=preference)
    bound_s = work_bound_s(problem, shortlist.evaluator.sizes)
    return with_findings(plan, bound_s, finished=shortlist.finished and not expired())


def _pipelines(problem: Problem) -> list[tuple[list[int], int]]:
    """(rank of every stage, samples of a micro-batch) of all pipelines to try.

    Raises:
        InfeasibleError: stages or micro-batches do not suit the schedule.
    """
    request, ranks = problem.request, problem.cluster.ranks
    if request.listed is not None:
        size = _size_of_lists(request.listed, request, problem.cluster)
        accepted(request, [size], fixed=True)
        stages = len(request.listed.rank_of_stage)
        check_cuts(stages, len(problem.graph), "use a schedule of fewer stages")
        return [(list(request.listed.rank_of_stage), size)]
    staleness = SCHEDULES[request.schedule or ""].staleness
    if staleness is None:
        places = _places(request, ranks, len(problem.graph))
        return [(places, size) for size in pipeline_sizes(request, len(set(places)))]
    if staleness.one_micro_batch and request.micro_batches not in (None, 1):
        raise InfeasibleError(
            f"no feasible plan: schedule {request.schedule} updates after every micro-batch, "
            f"so a batch cannot be divided into {request.micro_batches}",
            cure="leave pipeline.micro_batches out, or use another schedule",
        )
    if request.backward_apart:
        stages = request.fixed_stages or 1
        if 2 * stages > ranks:
            raise InfeasibleError(
                f"no feasible plan: backwards apart take two ranks per stage, which is "
                f"{2 * stages} ranks in all, and the job has {ranks}",
                cure="set pipeline.backward to together, use fewer stages, or more ranks",
            )
        ranks //= 2
    return [
        (list(range(stages)), size)
        for stages in reversed(stage_counts(request, ranks, len(problem.graph)))
        for size in (
            accepted(request, [request.batch_size], fixed=True)
            if staleness.one_micro_batch
            else pipeline_sizes(request, stages * (2 if request.backward_apart else 1))
        )
    ]


def pipeline_sizes(request: PlanRequest, ranks: int) -> list[int]:
    """Micro-batch sizes to try for a pipeline of ``ranks`` ranks, largest first."""
    if request.micro_batches is not None:
        return micro_batch_sizes(request, request.batch_size)
    sizes = {ceil(request.batch_size / (count * ranks)) for count in PIPELINE_MICRO_BATCHES}
    return accepted(request, sorted(sizes, reverse=True))


def _proposals(
    problem: Problem, cutter: Cutter, places: Sequence[int], size: int
) -> Iterator[Plan]:
    """Plans without predictions for stages on the given ranks; even cuts if time is up."""
    request = problem.request
    schedule = None if request.listed else SCHEDULES[request.schedule or ""]
    fixed = schedule is None or schedule.placement is not Placement.STRAIGHT
    layouts = layouts_for(problem, cutter, places, size, fixed=fixed)
    if not layouts:
        layouts = [Layout(even_partition(problem, len(places), size), one_each(tuple(places)))]
    for layout in layouts:
        yield from _in_order(problem, layout, size, request.schedule)


def layouts_for(
    problem: Problem, cutter: Cutter, ranks: Sequence[int], size: int, *, fixed: bool = True
) -> list[Layout]:
    """Stages with the smallest bottleneck, regardless of memory; none if time is up.

    Args:
        ranks: of every stage; stages may share one.
        size: samples of a micro-batch.
        fixed: whether stages must lie on these ranks, not on others of the same kinds.
    """
    count, layouts = len(ranks), list[Layout]()
    allowed = [_mix_of(problem, ranks)]
    if not fixed:
        allowed = cutter.mixes(count)
    with suppress(OutOfTimeError):
        for mix in allowed:
            cuts = cutter.partitions(count, size, mix)
            if fixed:
                layouts += [Layout(cut.partition, one_each(tuple(ranks))) for cut in cuts]
            else:
                layouts += layouts_of(problem, cuts)
    return list(dict.fromkeys(layouts))


def _mix_of(problem: Problem, ranks: Sequence[int]) -> Mix:
    """The kinds of device of stages on these ranks."""
    kind_of = {rank: kind for kind, pool in enumerate(problem.devices) for rank in pool.ranks}
    return Mix.ordered([kind_of[rank] for rank in ranks], len(problem.devices))


def propose_other_schedules(
    problem: Problem, cutter: Cutter, known: Sequence[Plan], *, splits_backward: bool
) -> Iterator[Plan]:
    """Plans without predictions for all schedules with flushes, if the schedule is open.

    The stages of a rank share its speed, so stages are cut for the devices of their ranks. They are
    cut for the micro-batch size of the best plan and, as operators differ in what they gain from
    large micro-batches, for all other sizes too, unless there are many cuts. With one stage per
    rank, the best plan's stages are tried as well.

    Args:
        known: plans of other schedules, the best first; may be empty.
        splits_backward: of the schedules to propose.
    """
    ranks, request = problem.cluster.ranks, problem.request
    if ranks == 1 or request.warm_up is not None or request.schedule is not None:
        return
    cuts: dict[tuple[tuple[int, ...], int], list[Layout]] = {}
    straight = [
        (
            Layout(
                problem.partition_of(stage.nodes for stage in plan.stages),
                tuple(stage.ranks for stage in plan.stages),
            ),
            plan.micro_batch_size,
        )
        for plan in known[:1]
        if all(stage.replicas == 1 for stage in plan.stages)
    ]
    sizes = pipeline_sizes(request, ranks)
    if request.micro_batches is None:
        sizes = list(dict.fromkeys([*(plan.micro_batch_size for plan in known[:1]), *sizes]))
    for name in OTHER_SCHEDULES:
        schedule = SCHEDULES[name]
        if not schedule.flushes or schedule.splits_backward != splits_backward:
            continue
        layouts = _balanced_stages(problem, cutter, schedule, sizes, cuts)
        if schedule.placement is Placement.STRAIGHT:
            layouts = [*straight, *layouts]
        for layout, size in layouts:
            if 2 * len(layout.ranks) * problem.micro_batches(size) <= MAX_ACTIONS_PER_STEP:
                yield from _in_order(problem, layout, size, name)


def _balanced_stages(
    problem: Problem,
    cutter: Cutter,
    schedule: Schedule,
    sizes: Sequence[int],
    cuts: dict[tuple[tuple[int, ...], int], list[Layout]],
) -> list[tuple[Layout, int]]:
    """The most promising stages of a schedule on all ranks, with their micro-batch sizes.

    Args:
        sizes: to try; the cuts for the first are tried with all of them.
        cuts: from other schedules, by the ranks of all stages and the size.
    """
    request, ranks, layouts = problem.request, problem.cluster.ranks, []
    cuts_every_size = cutter.cut_count <= MAX_CUTS_FOR_EVERY_SIZE
    for chunks in schedule.stages_per_rank:
        stages = chunks * ranks
        if request.stages not in (None, stages) or stages > len(problem.graph):
            continue
        places = schedule.placement.ranks(stages, ranks)
        assert places is not None
        fixed = schedule.placement is not Placement.STRAIGHT
        for size in sizes:
            tried: dict[Layout, None] = {}
            for cut_size in (sizes[0], size) if cuts_every_size else sizes[:1]:
                key = places, cut_size
                if key not in cuts:
                    cuts[key] = layouts_for(problem, cutter, places, cut_size, fixed=fixed)
                tried |= dict.fromkeys(cuts[key])
            count = problem.micro_batches(size)
            order = orders_of_schedule(schedule.name, stages, ranks, request, count)[0]

            def least_s(layout: Layout, size: int = size, order: Order = order) -> float:
                return least_step_s(problem.plan(Choice(layout, size, *order)), problem.cluster)

            layouts += [(layout, size) for layout in sorted(tried, key=least_s)[:MAX_LAYOUTS]]
    return layouts


def _cut_for_memory(plan: Plan, cutter: Cutter, shortlist: Shortlist) -> list[Plan]:
    """Cut again, on the same ranks, the stages of a plan that does not fit.

    Stages are cut for balance within a memory limit per stage. The limit of a rank is divided among
    its stages in proportion to their memory in the last simulated plan.

    Args:
        plan: with a prediction.

    Returns:
        Plans with predictions, the last of which may fit.
    """
    evaluator, problem, last = shortlist.evaluator, shortlist.evaluator.problem, plan
    size, order = last.micro_batch_size, (last.schedule, last.warm_up)
    ranks = tuple(stage.ranks for stage in last.stages)
    mix = _mix_of(problem, [rank for (rank,) in ranks])
    others: list[Plan] = []
    with suppress(OutOfTimeError):
        for _ in range(MAX_CUTS_FOR_MEMORY):
            wanted = replace(
                cut_request(problem, size, last.warm_up, mix),
                reserved_bytes=_reserved_bytes(last, problem),
            )
            tried = []
            for cut in merged(cutter.within_limits(wanted)) or cutter.smallest_peak(wanted):
                if evaluator.is_exhausted:
                    break
                layout = Layout(cut.partition, ranks, cut.recompute)
                changed = problem.plan(Choice(layout, size, *order))
                changed = replace(changed, actions=last.actions, assumptions=last.assumptions)
                tried.append(evaluator.run(changed))
            if not tried:
                break
            others += tried
            before, last = last, min(tried, key=problem.excess_bytes)
            if problem.excess_bytes(last) <= 0:
                break
            if problem.excess_bytes(last) >= problem.excess_bytes(before):
                break
    return others


def _reserved_bytes(plan: Plan, problem: Problem) -> tuple[float, ...]:
    """Bytes that every stage leaves to the other stages of its rank, and to memory of no stage, if
    the contents of every rank are scaled to its limit."""
    assert plan.prediction is not None
    peaks, baseline = plan.prediction.peak_memory_bytes, problem.baseline_bytes
    reserved = []
    for stage, in_flight in zip(plan.stages, plan.warm_up, strict=True):
        (rank,), cost = stage.ranks, stage.cost
        limit = problem.limit_bytes(rank)
        stage_bytes = cost.resident_bytes + cost.accumulated_bytes + cost.cast_bytes
        stage_bytes += in_flight * stage.kept_bytes + stage.recompute * cost.saved_bytes
        share = stage_bytes / max(1, peaks[rank] - baseline)
        reserved.append((limit - baseline) * (1 - share) if limit < inf else 0.0)
    return tuple(reserved)


def _in_order(problem: Problem, layout: Layout, size: int, schedule: str | None) -> Iterator[Plan]:
    """Plans with the stages of a layout in every order to try.

    Args:
        schedule: None for lists.
    """
    request, listed, count = problem.request, problem.request.listed, problem.micro_batches(size)
    if schedule is None:
        assert listed is not None
        plan = problem.plan(Choice(layout, size, listed.name, listed.warm_up))
        yield replace(plan, actions=listed.text, assumptions=(*plan.assumptions, *notices(listed)))
        return
    staleness, stages = SCHEDULES[schedule].staleness, len(layout.ranks)
    elsewhere: Ranks = ()
    apart = (staleness is not None and bool(request.backward_apart),) * stages
    if apart[0]:
        pairs = ranks_with_backwards(apart, problem.cluster)
        layout = layout._replace(ranks=tuple(pair[:1] for pair in pairs))
        elsewhere = tuple(pair[1:] for pair in pairs)
    if staleness is None:
        ranks = len(set(layout.ranks))
        orders = orders_of_schedule(schedule, stages, ranks, request, count)
    else:
        warm_up = default_warm_up(schedule, stages, count, apart=apart)
        orders = [(schedule, warm_up)]
    for order in orders:
        plan = problem.plan(Choice(layout, size, *order, backward_ranks=elsewhere))
        if staleness is not None:
            words = f"schedule {schedule} is asynchronous: {staleness.words(order[1])}"
            plan = replace(plan, assumptions=(*plan.assumptions, words))
        yield plan


def _size_of_lists(listed: Listed, request: PlanRequest, cluster: Cluster) -> int:
    """Samples of a micro-batch.

    Raises:
        InfeasibleError: the batch cannot be cut into as many micro-batches as the lists have, or
            there are too few ranks.
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
    """Effects of the lists besides time and memory, in words."""
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
        blocks: number that the graph has.

    Raises:
        InfeasibleError: the schedule does not allow this number of stages, or the graph cannot be
            cut into them.
    """
    assert request.schedule is not None
    fixed, schedule = request.fixed_stages, SCHEDULES[request.schedule]
    placement, chunks = schedule.placement, schedule.stages_per_rank[0]
    v_shaped = placement is Placement.V_SHAPED
    other = f"set pipeline.schedule to auto: {request.schedule} has two stages or more per rank"
    check_cuts(2 if v_shaped else 1, blocks, other)
    if fixed is not None:
        check_cuts(fixed, blocks, f"set pipeline.stages to {blocks} or less, or to auto")
    stages = fixed or min(chunks * ranks, blocks)
    if fixed is None and v_shaped:
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


def orders_of_schedule(
    schedule: str,
    stages: int,
    ranks: int,
    request: PlanRequest,
    micro_batches: int,
    replicas: tuple[int, ...] | None = None,
) -> list[Order]:
    """Orders to try with one of the schedules of this module.

    Args:
        ranks: over which the stages lie.
        replicas: of every stage, if they take whole micro-batches in turn.
    """
    warm_ups = SCHEDULES[schedule].warm_ups(Shape(stages, ranks, micro_batches, replicas))
    if request.warm_up is not None:
        warm_ups = [request.warm_up]
    depths = (tuple(min(depth, micro_batches) for depth in each) for each in warm_ups)
    return [(schedule, warm_up) for warm_up in dict.fromkeys(depths)]
