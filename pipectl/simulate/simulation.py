"""Simulation of one optimizer step from the costs of a plan and the links of a cluster.

What is modelled:

- A rank runs its rows in order. WAIT rows last until what was started is over. Computing takes its
  share of what a full micro-batch takes, over the device's speed; a recomputation takes as long as
  the forward, the halves of a split backward what the plan says.
- Where the cluster knows it, the rows of messages take time of the rank itself, and so do the begin
  of a step, what follows a computation, the meeting before an update and its end
  (:mod:`pipectl.link`). On shared cores the time of rows is added to the next computation.
- A message moves once both ends have started it (rendezvous) and passes links that it may share
  (:mod:`pipectl.simulate.network`, :mod:`pipectl.simulate.events`).
- Copies to and from the memory of the host follow one another in each direction.
- Gradients are summed over the replicas of a stage once all of them have started that, while they
  compute on; sums do not share links with anything else (:mod:`pipectl.simulate.network`).
- Ranks of a node share its cores evenly while more of them compute than there are cores.
- At UPDATE all ranks meet, then each updates its stages.
- Where steps are not flushed, ranks do not meet, and what is simulated is the steady state. Two
  stretches are executed from empty pipeline to empty one, the second with as many steps more as the
  first has steady ones. Both fill and drain alike, so what they differ in is the steady state.

Events at the same time are taken in the order they were foreseen, so equal inputs give equal
results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Prediction
from pipectl.schedule.actions import EVENT_NAMES, Actions, Kind
from pipectl.schedule.lowering import lower_stretch
from pipectl.schedule.registry import is_unflushed
from pipectl.schedule.unflushed import steps_apart
from pipectl.simulate.machine import Machine, Record
from pipectl.timeline import Event, Timeline

SETTLED = 4
"""Micro-batches for every stage, by the end of which all wait as long as in all later steps, where
steps overlap."""


@dataclass(frozen=True)
class Simulation(Prediction):
    """One simulated optimizer step; where steps overlap, one of many, from update to update.

    Args:
        record: executes the step once more and says what every rank did.
    """

    record: Callable[[], Sequence[Record]] = field(repr=False, compare=False, kw_only=True)

    @cached_property
    def timeline(self) -> Timeline:
        """What took time, by rank and start; waits that lasted no time are left out.

        Where steps overlap, that of several, from empty pipeline to empty one.
        """
        events = (
            Event(rank, start, end, EVENT_NAMES[kind], *rest)
            for rank, start, end, kind, *rest in self.record()
            if end > start or kind < Kind.SEND_START
        )
        return Timeline(tuple(events), len(self.utilisation))

    @property
    def prediction(self) -> Prediction:
        """The figures a plan records."""
        return Prediction(**{each.name: getattr(self, each.name) for each in fields(Prediction)})


def simulate(
    plan: Plan,
    cluster: Cluster,
    programs: Sequence[Actions] | None = None,
    *,
    process_baseline_bytes: int = 0,
) -> Simulation:
    """Execute one optimizer step.

    Args:
        programs: of every rank, with the plan's micro-batches or fewer; by default its own. Where
            steps overlap, it is always its own.
        process_baseline_bytes: what a process holds before it has a stage; added to the peaks.

    Raises:
        MismatchError: if the plan uses nodes the cluster lacks.
        ScheduleError: if the programs wait for each other for ever.
    """
    if is_unflushed(plan):
        steady = max(2, ceil(SETTLED * len(plan.stages) / plan.micro_batches))
        machine, longer = (_stretch(plan, cluster, steady * n) for n in (1, 2))
        short_s, long_s = machine.run(), longer.run()
        step_time_s = (long_s - short_s) / steady
        busy = zip(machine.busy_s(), longer.busy_s(), strict=True)
        busy_s = [(more - less) / steady for less, more in busy]
    else:
        machine = Machine(plan, cluster, programs)
        step_time_s, busy_s = machine.run(), machine.busy_s()

    def record() -> list[Record]:
        """What every rank does; where steps overlap, in the shortest stretch with a steady one."""
        if is_unflushed(plan):
            again = _stretch(plan, cluster, 1, record=True)
        else:
            again = Machine(plan, cluster, programs, record=True)
        again.run()
        return again.records()

    utilisation = tuple(busy / step_time_s if step_time_s else 0.0 for busy in busy_s)
    return Simulation(
        step_time_s=step_time_s,
        bubble=max(0.0, 1 - sum(utilisation) / len(utilisation)),  # sums round
        utilisation=utilisation,
        peak_memory_bytes=machine.peak_memory_bytes(process_baseline_bytes),
        peak_flops_per_s=cluster.peak_flops_per_s(plan.node_of_rank),
        record=record,
    )


def _stretch(plan: Plan, cluster: Cluster, steady: int, *, record: bool = False) -> Machine:
    """A machine that executes steps that overlap, from empty pipeline to empty one."""
    steps = steady + steps_apart(plan)
    programs = [lower_stretch(plan, rank, steps) for rank in range(plan.ranks)]
    return Machine(plan, cluster, programs, steps=steps, record=record)
