"""The schedules a plan can name, and what each rank computes under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipectl.errors import ScheduleError
from pipectl.plan import Plan
from pipectl.schedule import gpipe, one_f_one_b
from pipectl.schedule.actions import Actions, Program

Generator = Callable[[Sequence[int], int, Sequence[int]], Actions]

GENERATORS: dict[str, Generator] = {
    gpipe.NAME: gpipe.generate,
    one_f_one_b.NAME: one_f_one_b.generate,
}
"""(stages of a rank, micro-batches, warm-up of every stage) -> compute actions of the rank."""

NAMES = tuple(GENERATORS)


def default_warm_up(schedule: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """The warm-up of a schedule where none is chosen (for 1F1B policy A)."""
    depth = gpipe.warm_up if schedule == gpipe.NAME else one_f_one_b.policy_a
    return depth(stages, micro_batches)


def compute_actions(plan: Plan, rank: int, micro_batches: int | None = None) -> Actions:
    """What one rank computes in a step, without messages and without UPDATE.

    Args:
        micro_batches: of this step; by default the plan's.

    Raises:
        ScheduleError: if the plan names no known schedule.
    """
    if plan.schedule not in GENERATORS:
        raise ScheduleError(
            f"schedule: {plan.schedule!r} is not known", cure=f"one of: {', '.join(NAMES)}"
        )
    generate = GENERATORS[plan.schedule]
    return generate(plan.stages_of_rank(rank), micro_batches or plan.micro_batches, plan.warm_up)


def compute_programs(plan: Plan, micro_batches: int | None = None) -> list[Program]:
    """:func:`compute_actions` of every rank."""
    return [Program(compute_actions(plan, rank, micro_batches)) for rank in range(plan.ranks)]
