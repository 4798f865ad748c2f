"""Simulation of one optimizer step from the costs of a plan and the links of a cluster.

The model:

- A rank runs its rows in order. A WAIT row lasts until its operation is over. A computation takes
  its share of the time of a full micro-batch, divided by the speed of the device. A recomputation
  takes the time of its forward; the halves of a split backward take the times in the plan.
- If the cluster has row times, these are time of the rank itself: of the rows of messages, at the
  start of a step, after a computation, at the meeting before an update and at its end
  (:mod:`pipectl.link`). On shared cores the time of rows is added to the next computation.
- A message moves when both ends have started it (rendezvous), over links that it may share
  (:mod:`pipectl.simulate.network`, :mod:`pipectl.simulate.events`).
- Copies to and from host memory run one after another in each direction.
- Gradients are summed over the replicas of a stage when all replicas have started the sum, while
  they continue to compute. Sums share no link (:mod:`pipectl.simulate.network`).
- Ranks of a node share its cores evenly while more ranks compute than there are cores.
- At UPDATE all ranks meet, then each rank updates its stages.
- If steps are not flushed, ranks do not meet, and the steady state is simulated: two stretches are
  executed between empty pipelines, the second with twice as many steady steps. Both fill and drain
  alike, so their difference is the steady state.

Simultaneous events are processed in the order of scheduling, so equal inputs give equal results.
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

MICRO_BATCHES_TO_STEADY = 4
"""Micro-batches per stage after which waits do not change any more, if steps overlap."""


@dataclass(frozen=True)
class Simulation(Prediction):
    """One simulated optimizer step; if steps overlap, one of many, from update to update.

    Args:
        record: executes the step again and returns what every rank did.
    """

    record: Callable[[], Sequence[Record]] = field(repr=False, compare=False, kw_only=True)

    @cached_property
    def timeline(self) -> Timeline:
        """Events by rank and start, without waits that took no time.

        If steps overlap, the timeline has several steps, between two empty pipelines.
        """
        events = (
            Event(rank, start, end, EVENT_NAMES[kind], *rest)
            for rank, start, end, kind, *rest in self.record()
            if end > start or kind < Kind.SEND_START
        )
        return Timeline(tuple(events), len(self.utilisation))

    @property
    def prediction(self) -> Prediction:
        """The figures that a plan contains."""
        return Prediction(**{each.name: getattr(self, each.name) for each in fields(Prediction)})


def simulate(
    plan: Plan,
    cluster: Cluster,
    programs: Sequence[Actions] | None = None,
    *,
    process_baseline_bytes: int = 0,
) -> Simulation:
    """Simulate one optimizer step.

    Args:
        programs: of every rank, with at most the plan's micro-batches; by default the plan's own,
            which are always used if steps overlap.
        process_baseline_bytes: memory of a process without a stage; added to the peaks.

    Raises:
        MismatchError: the plan uses nodes that the cluster lacks.
        ScheduleError: the programs wait for each other forever.
    """
    if is_unflushed(plan):
        steady = max(2, ceil(MICRO_BATCHES_TO_STEADY * len(plan.stages) / plan.micro_batches))
        machine, longer = (_stretch(plan, cluster, steady * n) for n in (1, 2))
        short_s, long_s = machine.run(), longer.run()
        step_time_s = (long_s - short_s) / steady
        busy = zip(machine.busy_s(), longer.busy_s(), strict=True)
        busy_s = [(more - less) / steady for less, more in busy]
    else:
        machine = Machine(plan, cluster, programs)
        step_time_s, busy_s = machine.run(), machine.busy_s()

    def record() -> list[Record]:
        """Execute the step again; if steps overlap, the shortest stretch with a steady one."""
        if is_unflushed(plan):
            again = _stretch(plan, cluster, 1, record=True)
        else:
            again = Machine(plan, cluster, programs, record=True)
        again.run()
        return again.records()

    utilisation = tuple(busy / step_time_s if step_time_s else 0.0 for busy in busy_s)
    return Simulation(
        step_time_s=step_time_s,
        bubble=max(0.0, 1 - sum(utilisation) / len(utilisation)),  # rounding may exceed 1
        utilisation=utilisation,
        peak_memory_bytes=machine.peak_memory_bytes(process_baseline_bytes),
        peak_flops_per_s=cluster.peak_flops_per_s(plan.node_of_rank),
        record=record,
    )


def _stretch(plan: Plan, cluster: Cluster, steady: int, *, record: bool = False) -> Machine:
    """Return a machine that executes overlapping steps between two empty pipelines."""
    steps = steady + steps_apart(plan)
    programs = [lower_stretch(plan, rank, steps) for rank in range(plan.ranks)]
    return Machine(plan, cluster, programs, steps=steps, record=record)
