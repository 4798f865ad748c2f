"""The built-in schedules by name, the schedule of a plan, and schedules of users.

A user's schedule is a file, or a function that a package offers as an entry point of the group
``pipectl.schedules``. The function takes the numbers of ranks, stages and micro-batches, and
returns the actions of every rank as in a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from math import ceil
from pathlib import Path

from pipectl.errors import ScheduleError, UsageError
from pipectl.plan import Plan, Replication
from pipectl.schedule.interleaved import INTERLEAVED, LOOPED_BFS
from pipectl.schedule.listed import Listed, schedule_of_lists
from pipectl.schedule.one_f_one_b import GPIPE, ONE_F_ONE_B, ZB_H1
from pipectl.schedule.order import Order, Placement, Schedule, Shape
from pipectl.schedule.pipedream import PIPEDREAM, PIPEDREAM_2BW
from pipectl.schedule.v_shaped import DUAL_PIPE_V, V_HALF, V_MIN, ZB_V
from pipectl.units import did_you_mean

SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        GPIPE,
        ONE_F_ONE_B,
        INTERLEAVED,
        LOOPED_BFS,
        ZB_H1,
        ZB_V,
        DUAL_PIPE_V,
        V_HALF,
        V_MIN,
        PIPEDREAM,
        PIPEDREAM_2BW,
    )
}
NAMES = tuple(SCHEDULES)
_GROUP = "pipectl.schedules"
_EXAMPLES = {
    Placement.ROUND: "as many stages, in turn: 4 stages of 2 ranks are on 0, 1, 0, 1",
    Placement.V_SHAPED: "two stages, in a V: 4 stages of 2 ranks are on 0, 1, 1, 0",
}


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule of a plan, which may be the user's own.

    Raises:
        ScheduleError: the name is unknown, or the lists are invalid.
    """
    if plan.actions:
        return plan.derived(schedule_of_lists)
    if plan.schedule not in SCHEDULES:
        raise ScheduleError(
            f"schedule: {plan.schedule!r} is not known", hint=f"one of: {', '.join(NAMES)}"
        )
    return SCHEDULES[plan.schedule]


def order_of(plan: Plan, micro_batches: int) -> Order:
    """Return the order of a plan's step.

    Args:
        micro_batches: number in the step, at most the plan's; without flushes, in all steps of a
            stretch.

    Raises:
        ScheduleError: the schedule is unknown, or the plan's stages do not suit it.
    """
    shape = replace(plan.derived(_shape_of), micro_batches=micro_batches)
    return schedule_of(plan).order(shape, plan.warm_up)


def splits_backwards(plan: Plan) -> bool:
    """Return whether a plan's backwards are split into halves; see :class:`Order`."""
    return schedule_of(plan).splits_backward


def is_unflushed(plan: Plan) -> bool:
    """Return whether steps overlap, so that gradients belong to older weights than they update."""
    return not plan.actions and plan.schedule in SCHEDULES and not schedule_of(plan).flushes


def default_ranks(schedule: str, stages: int, ranks: int | None = None) -> tuple[int, ...]:
    """Return the rank of each stage, with one replica per stage.

    Args:
        ranks: number of ranks if stages go round-robin; by default two stages per rank.

    Raises:
        ScheduleError: the stages do not fit on these ranks.
    """
    placement = SCHEDULES[schedule].placement
    if placement is Placement.STRAIGHT:
        ranks = stages
    elif placement is Placement.V_SHAPED or ranks is None:
        ranks = ceil(stages / 2)
    places = placement.ranks(stages, ranks)
    if places is None:
        raise ScheduleError(
            f"schedule {schedule}: {placement.misfit(stages, ranks)}",
            hint=f"give every rank {_EXAMPLES[placement].split(':')[0]}",
        )
    return places


def default_warm_up(
    schedule: str,
    stages: int,
    micro_batches: int,
    *,
    ranks: int | None = None,
    replicas: Sequence[int] | None = None,
    apart: Sequence[bool] = (),
) -> tuple[int, ...]:
    """Return the default warm-up of a schedule (for 1F1B, policy A).

    Args:
        ranks: number of ranks, with one replica per stage.
        replicas: number per stage, if they take whole micro-batches in turn.
        apart: whether the backward of each stage runs on a rank of its own, if steps overlap.
    """
    known = SCHEDULES[schedule]
    if known.placement is Placement.V_SHAPED:
        ranks = stages // 2
    in_turn, alone = tuple(replicas or ()) or None, tuple(apart) or None
    return known.warm_ups(Shape(stages, ranks or stages, micro_batches, in_turn, alone))[0]


def _shape_of(plan: Plan) -> Shape:
    schedule, held = schedule_of(plan), [stage.ranks for stage in plan.stages]
    if schedule.staleness is not None:
        _check_overlapping_steps(plan, schedule)
    count, placement = len(set(held)), schedule.placement
    place = {ranks: number for number, ranks in enumerate(dict.fromkeys(held))}
    if placement is not Placement.STRAIGHT and placement.ranks(len(held), count) != tuple(
        place[ranks] for ranks in held
    ):
        shown = ", ".join("+".join(map(str, ranks)) for ranks in held[:12])
        raise ScheduleError(
            f"schedule {plan.schedule}: stages are on ranks {shown}{', ...' * (len(held) > 12)}",
            hint=f"give every rank {_EXAMPLES[placement]}",
        )
    in_turn = plan.replication is Replication.WHOLE
    replicas = tuple(stage.replicas for stage in plan.stages) if in_turn else None
    return Shape(len(held), count, plan.micro_batches, replicas)


def _check_overlapping_steps(plan: Plan, schedule: Schedule) -> None:
    """Refuse replicas, several stages per rank, and unsuitable warm-ups and micro-batches, for
    which the versions of the weights are not defined."""
    assert schedule.staleness is not None
    ranks = [rank for stage in plan.stages for rank in {*stage.ranks, *stage.updating_ranks}]
    fault, hint = "", ""
    if len(set(ranks)) < len(ranks) or any(stage.replicas > 1 for stage in plan.stages):
        fault = "takes one stage per rank and one rank per stage, or two if backwards are apart"
        hint = "leave replicas out, and give each stage ranks of its own"
    elif schedule.staleness.one_micro_batch:
        if plan.micro_batches > 1:
            fault = f"updates after every micro-batch, but a step has {plan.micro_batches}"
            hint = f"use one micro-batch, or schedule {PIPEDREAM_2BW.name}"
    elif max(plan.warm_up) > plan.micro_batches:
        fault = f"has a warm-up of at most the {plan.micro_batches} micro-batches of a step, "
        fault, hint = f"{fault}not {max(plan.warm_up)}", "lower warm_up"
    if fault:
        raise ScheduleError(f"schedule {schedule.name}: {fault}", hint=hint)


def packaged_names() -> frozenset[str]:
    """Return the names of the schedules that installed packages offer."""
    return frozenset(entry_points(group=_GROUP).names)


def read_listed(path: Path, name: str) -> Listed:
    """Read the schedule in a file; messages and plans call it ``name``.

    Raises:
        ScheduleError: the lists are invalid; names the line and action.
        UsageError: the file cannot be read.
    """
    try:
        return Listed.read(path.read_text(encoding="utf-8-sig"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: cannot be read: {error}", hint="name a CSV file of actions, a line per rank"
        ) from None


def find_packaged(name: str) -> EntryPoint:
    """Return the entry point of the schedule that an installed package offers.

    Raises:
        UsageError: there is none of this name.
    """
    entries = entry_points(group=_GROUP, name=name)
    if not entries:
        known = (*NAMES, *sorted(packaged_names()))
        raise UsageError(
            f"there is no schedule {name!r}{did_you_mean(name, known)}",
            hint=f"one of: {', '.join(known)}, or a file that ends in .csv",
        )
    return next(iter(entries))


def make_listed(name: str, ranks: int, stages: int, micro_batches: int) -> Listed:
    """Return the schedule that an entry point makes.

    Raises:
        UsageError: there is no entry point of this name, or its function fails.
        ScheduleError: the lists are invalid.
    """
    entry = find_packaged(name)
    try:
        lists = entry.load()(ranks, stages, micro_batches)
        rows = (each if isinstance(each, str) else ",".join(map(str, each)) for each in lists)
        text = "\n".join(rows)
    except Exception as error:
        raise UsageError(
            f"schedule {name}: its function fails: {type(error).__name__}: {error}",
            hint="it takes (ranks, stages, micro_batches) and gives a list of actions per rank",
        ) from error
    return Listed.read(text, name)
