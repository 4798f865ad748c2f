"""The schedules a plan can name, and the order in which each lets all ranks compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from pipectl.errors import ScheduleError
from pipectl.plan import Plan, Replication
from pipectl.schedule import (
    dual_pipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    unflushed,
    zb_h1,
    zb_v,
)
from pipectl.schedule.listed_order import listed_order
from pipectl.schedule.order import Order, first_forwards


def order_of(plan: Plan, micro_batches: int) -> Order:
    """The order of a plan's step.

    Args:
        micro_batches: of the step; may be fewer than the plan's. Of a schedule without flushes, of
            all steps of a stretch.

    Raises:
        ScheduleError: if the plan names no known schedule, or its stages do not suit it.
    """
    if plan.actions:
        return plan.derived(listed_order)
    if plan.schedule not in _ORDERS:
        raise ScheduleError(
            f"schedule: {plan.schedule!r} is not known", cure=f"one of: {', '.join(NAMES)}"
        )
    return _ORDERS[plan.schedule](plan, micro_batches)


def splits_backwards(plan: Plan) -> bool:
    """Whether a plan's backwards are made in two halves; see :class:`Order`."""
    return order_of(plan, plan.micro_batches).weight is not None


def default_ranks(schedule: str, stages: int, ranks: int | None = None) -> tuple[int, ...]:
    """The rank of every stage, one replica each.

    Args:
        ranks: over which the stages go round, if they do; by default every rank gets two.

    Raises:
        ScheduleError: the stages do not go round over so many, or are odd where ranks have two.
    """
    if schedule in _V_SHAPED and stages % 2:
        raise ScheduleError(
            f"schedule {schedule}: {stages} stages", cure="give every rank two: an even number"
        )
    if schedule in _V_SHAPED:
        return (*range(stages // 2), *reversed(range(stages // 2)))
    if schedule not in (interleaved.NAME, looped_bfs.NAME):
        return tuple(range(stages))
    around = ranks or ceil(stages / 2)
    if stages % around:
        raise ScheduleError(
            f"schedule {schedule}: {stages} stages do not go round over {around} ranks",
            cure="give every rank as many stages",
        )
    return tuple(stage % around for stage in range(stages))


def default_warm_up(
    schedule: str,
    stages: int,
    micro_batches: int,
    *,
    ranks: int | None = None,
    replicas: Sequence[int] | None = None,
    apart: Sequence[bool] = (),
) -> tuple[int, ...]:
    """The warm-up of a schedule where none is chosen (for 1F1B policy A).

    Args:
        ranks: over which the stages go round, if they do.
        replicas: of every stage, if they take whole micro-batches in turn.
        apart: stages whose backward has a rank of its own, where steps overlap.
    """
    if schedule in (gpipe.NAME, looped_bfs.NAME):
        return gpipe.warm_up(stages, micro_batches)
    if schedule in _V_SHAPED:
        order = _V_SHAPED[schedule](stages // 2, micro_batches)
        return first_forwards(order, stages, micro_batches)
    if schedule == pipedream.NAME:
        return pipedream.warm_up(stages, apart)
    if schedule == pipedream_2bw.NAME:
        return pipedream_2bw.warm_up(stages, micro_batches, apart)
    if schedule == interleaved.NAME:
        shared_by = min(replicas or [1])
        return interleaved.warm_up(stages, micro_batches, ranks or stages, shared_by)
    return one_f_one_b.policy_a(stages, micro_batches, replicas)


def _interleaved(plan: Plan, _: int) -> Order:
    shared = plan.replication is Replication.WHOLE
    replicas = min(stage.replicas for stage in plan.stages) if shared else 1
    return interleaved.order(len(plan.stages), plan.derived(_round), shared_by=replicas)


def _looped_bfs(plan: Plan, micro_batches: int) -> Order:
    return looped_bfs.order(len(plan.stages), plan.derived(_round), micro_batches)


def _unflushed(plan: Plan, micro_batches: int) -> Order:
    """That of 1F1B, as if all steps were one."""
    unflushed.check(plan)
    return one_f_one_b.order(plan.warm_up, micro_batches)


def _round(plan: Plan) -> int:
    """After how many stages the ranks repeat.

    Raises:
        ScheduleError: if they do not go round.
    """
    ranks = [stage.ranks for stage in plan.stages]
    period = len(set(ranks))
    if ranks != ranks[:period] * (len(ranks) // period):
        raise ScheduleError(
            f"schedule {plan.schedule}: stages are on ranks {_short(ranks)}",
            cure="give every rank as many stages, in turn: 4 stages of 2 ranks are on 0, 1, 0, 1",
        )
    return period


def _v_shaped(plan: Plan, micro_batches: int) -> Order:
    """The order of a schedule with two stages a rank.

    Raises:
        ScheduleError: if they do not lie in a V.
    """
    ranks = [stage.ranks for stage in plan.stages]
    if ranks != ranks[::-1] or len(ranks) != 2 * len(set(ranks)):
        raise ScheduleError(
            f"schedule {plan.schedule}: stages are on ranks {_short(ranks)}",
            cure="give every rank two stages, in a V: 4 stages of 2 ranks are on 0, 1, 1, 0",
        )
    return _V_SHAPED[plan.schedule](len(ranks) // 2, micro_batches)


def _short(ranks: Sequence[tuple[int, ...]], most: int = 12) -> str:
    shown = ", ".join("+".join(map(str, held)) for held in ranks[:most])
    return f"{shown}{', ...' if len(ranks) > most else ''}"


_V_SHAPED: dict[str, Callable[[int, int], Order]] = {
    zb_v.NAME: zb_v.order,
    dual_pipe_v.NAME: dual_pipe_v.order,
}

_ORDERS: dict[str, Callable[[Plan, int], Order]] = {
    gpipe.NAME: lambda plan, micro_batches: gpipe.order(len(plan.stages), micro_batches),
    one_f_one_b.NAME: lambda plan, micro_batches: one_f_one_b.order(plan.warm_up, micro_batches),
    interleaved.NAME: _interleaved,
    looped_bfs.NAME: _looped_bfs,
    zb_h1.NAME: lambda plan, micro_batches: zb_h1.order(plan.warm_up, micro_batches),
    **dict.fromkeys(_V_SHAPED, _v_shaped),
    pipedream.NAME: _unflushed,
    pipedream_2bw.NAME: _unflushed,
}

NAMES = tuple(_ORDERS)
