"""Simulation of schedules that no step flushes: the time between steps, once it is steady.

Two stretches are executed from empty pipeline to empty one, the second with as many steps more as
the first has bodies. Both fill and drain alike, so what they differ in is the steady state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Plan
from pipectl.schedule.actions import Program
from pipectl.schedule.lowering import lower
from pipectl.schedule.unflushed import steps_apart
from pipectl.simulate.machine import Machine, Record
from pipectl.simulate.rows import with_sizes

SETTLED = 4
"""Micro-batches for every stage, by the end of which all wait as long as in all later steps."""


@dataclass(frozen=True)
class Steady:
    """The steady state of a plan.

    Args:
        step_time_s: between updates.
        busy_s: seconds of each step that each rank computes.
        peak_memory_bytes: the most each rank holds at once.
    """

    step_time_s: float
    busy_s: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]


def steady_state(
    plan: Plan,
    cluster: Cluster,
    programs: Sequence[Program] | None = None,
    *,
    process_baseline_bytes: int = 0,
) -> Steady:
    """Execute two stretches; their programs by default are the plan's.

    Raises:
        ScheduleError: ranks wait for ever, or see :func:`pipectl.schedule.lower`.
    """
    bodies = max(2, ceil(SETTLED * len(plan.stages) / plan.micro_batches))
    found = [_Stretch(plan, cluster, programs, bodies * times) for times in (1, 2)]
    short, long = (stretch.run() for stretch in found)
    return Steady(
        step_time_s=(long.time_s - short.time_s) / bodies,
        busy_s=tuple(
            (more - less) / bodies for less, more in zip(short.busy_s, long.busy_s, strict=True)
        ),
        peak_memory_bytes=found[0].machine.peak_memory_bytes(process_baseline_bytes),
    )


def record(plan: Plan, cluster: Cluster, programs: Sequence[Program] | None) -> list[Record]:
    """What every rank does in the shortest stretch that has a steady step."""
    stretch = _Stretch(plan, cluster, programs, 1, keep=True)
    stretch.run()
    return stretch.machine.records()


@dataclass(frozen=True)
class _Ran:
    time_s: float
    busy_s: list[float]


class _Stretch:
    """Steps one behind the other, as one long step of all their micro-batches."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        programs: Sequence[Program] | None,
        bodies: int,
        *,
        keep: bool = False,
    ) -> None:
        micro_batches = plan.micro_batches * (bodies + steps_apart(plan))
        whole = replace(
            plan,
            micro_batches=micro_batches,
            batch_size=micro_batches * plan.micro_batch_size,
        )
        given = programs or [lower(plan, rank) for rank in range(plan.ranks)]
        rows = [program.unrolled(bodies, plan.micro_batches) for program in given]
        flat = [Program(with_sizes(plan, item)) for item in rows]
        self.machine = Machine(whole, cluster, flat, record=keep)

    def run(self) -> _Ran:
        return _Ran(self.machine.run(), self.machine.busy_s())
