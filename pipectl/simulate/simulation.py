"""Simulation of one optimizer step from the costs of a plan and the links of a cluster.

What is modelled:

- A rank runs its rows in order. START rows take no time, WAIT rows last until the message is over.
- A message moves once both ends have started it (rendezvous) and shares its link with others.
- Ranks of a node share its cores evenly while more of them compute than there are cores.
- At UPDATE all ranks meet, then each updates its stages.

Events at the same time are taken in the order they were foreseen, so equal inputs give equal
results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipectl.cluster import Cluster
from pipectl.errors import MismatchError, ScheduleError
from pipectl.plan import Plan, Prediction
from pipectl.schedule.actions import Kind, Program
from pipectl.schedule.lowering import lower
from pipectl.schedule.memory import peak_memory_bytes
from pipectl.simulate.machine import Machine, Record
from pipectl.timeline import Event, Timeline

COMPUTE_KINDS = tuple(kind.name.lower() for kind in Kind if kind.is_compute)
"""Names of the timeline's events in which a rank computes; in all others it waits."""

_EVENT_NAMES = (*(kind.name.lower() for kind in Kind), "update_wait")


@dataclass(frozen=True)
class Simulation:
    """One simulated optimizer step.

    Args:
        records: rank, start, end, kind, stage and micro-batch of every computation and wait.
        bubble: share of the ranks' time in which they do not compute.
        utilisation: share of the step each rank computes.
        peak_memory_bytes: the most each rank holds at once.
    """

    records: Sequence[Record]
    step_time_s: float
    bubble: float
    utilisation: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]

    @cached_property
    def timeline(self) -> Timeline:
        """The records by rank and start; waits that lasted no time are left out."""
        events = (
            Event(rank, start, end, _EVENT_NAMES[kind], stage, micro_batch)
            for rank, start, end, kind, stage, micro_batch in sorted(self.records)
            if end > start or kind < Kind.SEND_START
        )
        return Timeline(tuple(events), len(self.utilisation))

    @property
    def prediction(self) -> Prediction:
        """The figures a plan records."""
        return Prediction(self.step_time_s, self.bubble, self.utilisation, self.peak_memory_bytes)


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
    if programs is None:
        programs = [lower(plan, rank) for rank in range(plan.ranks)]
    machine = Machine(plan, cluster, programs)
    step_time_s = machine.run()
    if machine.unfinished():
        raise ScheduleError(
            f"plan {plan.name!r}: ranks {machine.unfinished()} wait for ever",
            cure="schedule.validate says who waits for whom",
        )
    utilisation = tuple(busy / step_time_s if step_time_s else 0.0 for busy in machine.busy_s)
    return Simulation(
        records=machine.records,
        step_time_s=step_time_s,
        bubble=1 - sum(utilisation) / len(utilisation),
        utilisation=utilisation,
        peak_memory_bytes=tuple(
            peak_memory_bytes(plan, rank, program, process_baseline_bytes=process_baseline_bytes)
            for rank, program in enumerate(programs)
        ),
    )


def _check_nodes(plan: Plan, cluster: Cluster) -> None:
    used = 1 + max(plan.node_of_rank)
    if used > len(cluster.nodes):
        raise MismatchError(
            f"plan {plan.name!r} uses {used} nodes, cluster {cluster.name!r} has "
            f"{len(cluster.nodes)}",
            cure="plan again for this cluster",
        )
