"""The schedules a plan can name, and the order in which each lets all ranks compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipectl.errors import ScheduleError
from pipectl.plan import Plan, Replication
from pipectl.schedule import gpipe, interleaved, one_f_one_b
from pipectl.schedule.order import Order


def order_of(plan: Plan, micro_batches: int) -> Order:
    """The order of a plan's step.

    Args:
        micro_batches: of the step; may be fewer than the plan's.

    Raises:
        ScheduleError: if the plan names no known schedule, or its stages do not suit it.
    """
    if plan.schedule not in _ORDERS:
        raise ScheduleError(
            f"schedule: {plan.schedule!r} is not known", cure=f"one of: {', '.join(NAMES)}"
        )
    return _ORDERS[plan.schedule](plan, micro_batches)


def default_warm_up(
    schedule: str,
    stages: int,
    micro_batches: int,
    *,
    ranks: int | None = None,
    replicas: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The warm-up of a schedule where none is chosen (for 1F1B policy A).

    Args:
        ranks: over which the stages go round, if they do.
        replicas: of every stage, if they take whole micro-batches in turn.
    """
    if schedule == gpipe.NAME:
        return gpipe.warm_up(stages, micro_batches)
    if schedule == interleaved.NAME:
        shared_by = min(replicas or [1])
        return interleaved.warm_up(stages, micro_batches, ranks or stages, shared_by)
    return one_f_one_b.policy_a(stages, micro_batches, replicas)


def _interleaved(plan: Plan, _: int) -> Order:
    shared = plan.replication is Replication.WHOLE
    replicas = min(stage.replicas for stage in plan.stages) if shared else 1
    return interleaved.order(len(plan.stages), plan.derived(_round), shared_by=replicas)


def _round(plan: Plan) -> int:
    """After how many stages the ranks repeat.

    Raises:
        ScheduleError: if they do not go round.
    """
    ranks = [stage.ranks for stage in plan.stages]
    period = len(set(ranks))
    if ranks != ranks[:period] * (len(ranks) // period):
        raise ScheduleError(
            f"schedule {interleaved.NAME}: stages are on ranks {_short(ranks)}",
            cure="give every rank as many stages, in turn: 4 stages of 2 ranks are on 0, 1, 0, 1",
        )
    return period


def _short(ranks: Sequence[tuple[int, ...]], most: int = 12) -> str:
    shown = ", ".join("+".join(map(str, held)) for held in ranks[:most])
    return f"{shown}{', ...' if len(ranks) > most else ''}"


_ORDERS: dict[str, Callable[[Plan, int], Order]] = {
    gpipe.NAME: lambda plan, micro_batches: gpipe.order(len(plan.stages), micro_batches),
    one_f_one_b.NAME: lambda plan, micro_batches: one_f_one_b.order(plan.warm_up, micro_batches),
    interleaved.NAME: _interleaved,
}

NAMES = tuple(_ORDERS)
