"""Simulation of one optimizer step from the costs of a plan and the links of a cluster.

What is modelled:

- A rank runs its rows in order. WAIT rows last until what was started is over. Computing takes its
  share of what a full micro-batch takes, over the device's speed; a recomputation takes as long as
  the forward, the halves of a split backward what the plan says.
- Where the cluster knows it, the rows of messages take time of the rank itself, and so do the begin
  of a step, what follows a computation, the meeting before an update and its end
  (:mod:`pipectl.row_times`). On shared cores the time of rows is added to the next computation.
- A message moves once both ends have started it (rendezvous) and passes links that it may share
  (:mod:`pipectl.simulate.network`, :mod:`pipectl.simulate.way`).
- Copies to and from the memory of the host follow one another in each direction.
- Gradients are summed over the replicas of a stage once all of them have started that, while they
  compute on; sums do not share links with anything else (:mod:`pipectl.simulate.reduction`).
- Ranks of a node share its cores evenly while more of them compute than there are cores.
- At UPDATE all ranks meet, then each updates its stages. Where steps are not flushed they do not
  meet, and what is simulated is the steady state (:mod:`pipectl.simulate.steady`).

Events at the same time are taken in the order they were foreseen, so equal inputs give equal
results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pipectl.cluster import Cluster
from pipectl.errors import MismatchError
from pipectl.plan import Plan, Prediction
from pipectl.schedule.actions import EVENT_NAMES, Kind, Program
from pipectl.schedule.registry import is_unflushed
from pipectl.simulate import steady
from pipectl.simulate.machine import Machine, Record
from pipectl.timeline import Event, Timeline


@dataclass(frozen=True)
class Simulation:
    """One simulated optimizer step; where steps overlap, one of many.

    Args:
        step_time_s: from the start to the end of the step, or between updates where steps overlap.
        bubble: share of the ranks' time in which they do not compute.
        utilisation: share of the step each rank computes.
        peak_memory_bytes: the most each rank holds at once.
        peak_flops_per_s: most floating-point operations per second of all ranks; None if unknown.
        record: executes the step once more and says what every rank did.
    """

    step_time_s: float
    bubble: float
    utilisation: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]
    peak_flops_per_s: float | None
    record: Callable[[], Sequence[Record]] = field(repr=False, compare=False)

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
        return Prediction(
            self.step_time_s,
            self.bubble,
            self.utilisation,
            self.peak_memory_bytes,
            self.peak_flops_per_s,
        )


def simulate(
    plan: Plan,
    cluster: Cluster,
    programs: Sequence[Program] | None = None,
    *,
    process_baseline_bytes: int = 0,
) -> Simulation:
    """Execute one optimizer step.

    Args:
        programs: of every rank, with the plan's micro-batches or fewer; by default its own.
        process_baseline_bytes: what a process holds before it has a stage; added to the peaks.

    Raises:
        MismatchError: if the plan uses nodes the cluster lacks.
        ScheduleError: if the programs wait for each other for ever.
    """
    _check_nodes(plan, cluster)
    if is_unflushed(plan):
        return _simulate_steady(plan, cluster, programs, process_baseline_bytes)
    machine = Machine(plan, cluster, programs)
    step_time_s = machine.run()
    return _simulation(
        step_time_s,
        machine.busy_s(),
        peak_memory_bytes=machine.peak_memory_bytes(process_baseline_bytes),
        peak_flops_per_s=cluster.peak_flops_per_s(plan.node_of_rank),
        record=lambda: _record(plan, cluster, programs),
    )


def _simulate_steady(
    plan: Plan, cluster: Cluster, programs: Sequence[Program] | None, baseline: int
) -> Simulation:
    found = steady.steady_state(plan, cluster, programs, process_baseline_bytes=baseline)
    return _simulation(
        found.step_time_s,
        found.busy_s,
        peak_memory_bytes=found.peak_memory_bytes,
        peak_flops_per_s=cluster.peak_flops_per_s(plan.node_of_rank),
        record=lambda: steady.record(plan, cluster, programs),
    )


def _simulation(step_time_s: float, busy_s: Sequence[float], **others: Any) -> Simulation:
    utilisation = tuple(busy / step_time_s if step_time_s else 0.0 for busy in busy_s)
    bubble = max(0.0, 1 - sum(utilisation) / len(utilisation))  # sums round
    return Simulation(step_time_s, bubble, utilisation, **others)


def _record(plan: Plan, cluster: Cluster, programs: Sequence[Program] | None) -> list[Record]:
    machine = Machine(plan, cluster, programs, record=True)
    machine.run()
    return machine.records()


def _check_nodes(plan: Plan, cluster: Cluster) -> None:
    used = 1 + max(plan.node_of_rank)
    if used > len(cluster.nodes):
        raise MismatchError(
            f"plan {plan.name!r} uses {used} nodes, cluster {cluster.name!r} has "
            f"{len(cluster.nodes)}",
            cure="plan again for this cluster",
        )
