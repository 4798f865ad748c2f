"""A stretch of steps that are not flushed, as a rank executes it."""

from __future__ import annotations

from collections.abc import Iterator

from pipectl.plan import Plan
from pipectl.schedule.actions import Actions
from pipectl.schedule.lowering import lower, lower_stretch
from pipectl.schedule.unflushed import steps_apart


def stretch(plan: Plan, rank: int, steps: int) -> Iterator[tuple[Actions, int]]:
    """Rows, with what is to be added to their micro-batches, from empty pipeline to empty one.

    Long stretches repeat the body of the rank's program; short ones have none.

    Raises:
        ScheduleError: see :func:`pipectl.schedule.lower`.
    """
    bodies = steps - steps_apart(plan)
    if bodies < 1:
        return iter([(lower_stretch(plan, rank, steps), 0)])
    return lower(plan, rank).parts(bodies, plan.micro_batches)
