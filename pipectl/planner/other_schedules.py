"""Plans for the schedules besides 1F1B and GPipe, if the schedule is open.

Stages are cut for balance on the devices of their ranks. Interleaved 1F1B and looped breadth-first
place them round-robin, ZB-V and DualPipeV in a V, ZB-H1 and schedules without flushes one per rank.
A few micro-batches suffice, because these schedules shorten fill and drain; several numbers are
simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil

from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.bounds import least_step_s
from pipectl.planner.choices import NamedOrder, accepted, micro_batch_sizes
from pipectl.planner.costs.devices import Mix, one_each
from pipectl.planner.partition.cutter import Cutter, layouts_of
from pipectl.planner.partition.layout import Choice, Layout, Ranks, ranks_with_backwards
from pipectl.planner.plans import plan_of
from pipectl.planner.problem import Problem
from pipectl.planner.request import OTHER_SCHEDULES, PlanRequest
from pipectl.schedule import SCHEDULES, default_warm_up
from pipectl.schedule.listed import Listed
from pipectl.schedule.order import Placement, Schedule, Shape

PIPELINE_MICRO_BATCHES = (1, 2, 4, 8)
"""Numbers per rank to try if the request leaves it open."""
MAX_ACTIONS_PER_STEP = 150_000
"""Forwards and backwards of a step. Longer steps gain least from these schedules, and are not tried
if the schedule is open."""
MAX_CUTS_FOR_EVERY_SIZE = 1000
"""If a graph has more cuts, stages of an open schedule are cut for one micro-batch size."""
MAX_LAYOUTS_PER_SIZE = 8
"""Layouts to try per open schedule, number of stages and micro-batch size: those with the least
bounds in the first order."""
SEVERAL_STAGES_GAIN = 0.01
"""Share by which a step with several stages per rank must be faster if the schedule is open. It has
more messages, and smaller gains are below the error of predictions."""
SPLIT_GAIN, UNMEASURED_SPLIT_GAIN = 0.02, 0.08
"""Shares by which a step with split backwards must be faster if the schedule is open: if the
profile has the times of the halves, and if half of the backward is assumed for each."""


def pipeline_sizes(request: PlanRequest, ranks: int) -> list[int]:
    """Micro-batch sizes to try for a pipeline of ``ranks`` ranks, largest first."""
    if request.micro_batches is not None:
        return micro_batch_sizes(request, request.batch_size)
    sizes = {ceil(request.batch_size / (count * ranks)) for count in PIPELINE_MICRO_BATCHES}
    return accepted(request, sorted(sizes, reverse=True))


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
    allowed = [mix_of(problem, ranks)]
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


def mix_of(problem: Problem, ranks: Sequence[int]) -> Mix:
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
                yield from in_order(problem, layout, size, name)


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

            def least_s(layout: Layout, size: int = size, order: NamedOrder = order) -> float:
                return least_step_s(plan_of(problem, Choice(layout, size, *order)), problem.cluster)

            layouts += [
                (layout, size) for layout in sorted(tried, key=least_s)[:MAX_LAYOUTS_PER_SIZE]
            ]
    return layouts


def in_order(problem: Problem, layout: Layout, size: int, schedule: str | None) -> Iterator[Plan]:
    """Plans with the stages of a layout in every order to try.

    Args:
        schedule: None for lists.
    """
    request, listed, count = problem.request, problem.request.listed, problem.micro_batches(size)
    if schedule is None:
        assert listed is not None
        plan = plan_of(problem, Choice(layout, size, listed.name, listed.warm_up))
        said = () if request.reproducible else notices(listed)  # one order of sums for any list
        yield replace(plan, actions=listed.text, assumptions=(*plan.assumptions, *said))
        return
    staleness, stages = SCHEDULES[schedule].staleness, len(layout.ranks)
    backward_ranks: Ranks = ()
    apart = (staleness is not None and bool(request.backward_apart),) * stages
    if apart[0]:
        pairs = ranks_with_backwards(apart, problem.cluster)
        layout = layout._replace(ranks=tuple(pair[:1] for pair in pairs))
        backward_ranks = tuple(pair[1:] for pair in pairs)
    if staleness is None:
        ranks = len(set(layout.ranks))
        orders = orders_of_schedule(schedule, stages, ranks, request, count)
    else:
        warm_up = default_warm_up(schedule, stages, count, apart=apart)
        orders = [(schedule, warm_up)]
    for order in orders:
        plan = plan_of(problem, Choice(layout, size, *order, backward_ranks=backward_ranks))
        if staleness is not None:
            words = f"schedule {schedule} is asynchronous: {staleness.words(order[1])}"
            plan = replace(plan, assumptions=(*plan.assumptions, words))
        yield plan


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


def orders_of_schedule(
    schedule: str,
    stages: int,
    ranks: int,
    request: PlanRequest,
    micro_batches: int,
    replicas: tuple[int, ...] | None = None,
) -> list[NamedOrder]:
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
