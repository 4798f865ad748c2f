"""Waiting times of the ranks of a rehearsal, from the costs of the simulator.

A rehearsal runs many ranks on few cores and is slower than the plan:

- Ranks poll their messages with pauses, long enough that polling takes little of the cores.
- Time is stretched until an average computation is much longer than a pause, and at least 20 ms.
- If ranks share cores, messages are made smaller, so that copying takes little of the cores.

Only the simulator covers shared links, interfaces, directions and cores. A rehearsal is compared
with :func:`as_rehearsed`, a cluster without these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from pipectl.cluster import Cluster
from pipectl.errors import ScheduleError
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.rehearsal import Meeting, Passage, Rehearsal
from pipectl.schedule.actions import Actions, Kind
from pipectl.schedule.channel import shares
from pipectl.schedule.lowering import lower
from pipectl.schedule.registry import is_unflushed
from pipectl.simulate.network import Numbering, Stream, streams_of
from pipectl.simulate.simulation import Machine

SHORTEST_S = 0.020
"""Minimum length of an average computation, in time of the rehearsal."""
PAUSES = 10
"""Minimum length of an average computation, in pauses."""
PAUSE_S = 0.00025
LOOK_S = 20e-6
"""Processor time of one poll of the messages (measured)."""
LOOKING = 0.15
"""Share of the cores that polling takes."""
LATE = 0.5
"""Maximum delay that a rank makes up for, relative to an average computation."""
BYTES_PER_S = 256 * 2**20
"""Message bytes per second that a core handles, if ranks share it."""
LARGEST_BYTES = 2**30
"""Maximum size of a message; some MPI libraries do not take 2 GiB at once."""
MAX_STEPS, WANTED_S = 3, 30.0
_IDLE = 0.1


def rehearsal_of(plan: Plan, cluster: Cluster, ranks_per_core: float) -> Rehearsal:
    """Return what the ranks of a rehearsal wait for.

    Args:
        ranks_per_core: on the machine of the rehearsal.

    Raises:
        ScheduleError: steps overlap; see also :func:`pipectl.schedule.lower`.
        MismatchError: the plan uses nodes that the cluster lacks.
    """
    if is_unflushed(plan):
        raise ScheduleError(
            f"plan {plan.name!r}: schedule {plan.schedule} cannot be rehearsed: its steps overlap",
            hint="rehearse it with --set pipeline.schedule=1f1b, which moves and computes the same",
        )
    seen = as_rehearsed(cluster)
    programs = [lower(plan, rank) for rank in range(plan.ranks)]
    machine = Machine(replace(plan, updates_together=True), seen, programs)
    step_s = machine.run()
    pause_s = max(PAUSE_S, LOOK_S * ranks_per_core / LOOKING)
    average_s = _average_s(programs, machine.busy_s())
    stretch = _round_up(max(1.0, max(SHORTEST_S, PAUSES * pause_s) / average_s))
    numbering = Numbering(plan)
    costs, ranks = machine.tables.work_s, machine.tables.ranks
    streams = streams_of(plan, seen, numbering)
    return Rehearsal(
        stretch=stretch,
        message_share=_message_share(plan, programs, numbering, step_s * stretch, ranks_per_core),
        pause_s=pause_s,
        late_s=LATE * average_s * stretch,
        steps=int(min(MAX_STEPS, max(1.0, WANTED_S / max(step_s * stretch, 1e-9)))),
        predicted_s=step_s,
        work_s={kind.name: tuple(costs[kind].tolist()) for kind in Kind if kind.is_compute},
        update_s=tuple(ranks["update_s"].tolist()),
        speed=tuple(ranks["speed"].tolist()),
        messages=tuple(_passage(stream) for stream in streams[: len(numbering.channels)]),
        meetings=tuple(_meetings(plan, numbering, streams)),
    )


def as_rehearsed(cluster: Cluster) -> Cluster:
    """Return the cluster with a core per rank, unshared links, and no row times."""
    nodes = tuple(
        replace(node, cores=max(node.cores, node.ranks), device=replace(node.device, rows=None))
        for node in cluster.nodes
    )

    def alone(link: Link) -> Link:
        return replace(link, duplex=True, shared=False, interface=False)

    switches = cluster.between_switches
    return replace(
        cluster,
        nodes=nodes,
        within_node=alone(cluster.within_node),
        between_nodes=alone(cluster.between_nodes),
        between_switches=None if switches is None else alone(switches),
    )


def _average_s(programs: Sequence[Actions], busy_s: Sequence[float]) -> float:
    """Return the shortest average computation of a rank, among ranks that are not mostly idle."""
    much_s = _IDLE * max(busy_s)
    counts = [int((program.column("kind") < Kind.UPDATE).sum()) for program in programs]
    averages = [
        rank_s / count
        for rank_s, count in zip(busy_s, counts, strict=True)
        if count and rank_s >= much_s > 0
    ]
    return min(averages, default=SHORTEST_S)


def _round_up(stretch: float) -> float:
    """Round up to two digits; at least 1."""
    if stretch <= 1.0:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(stretch)) - 1)
    return round(math.ceil(stretch / unit - 1e-9) * unit, 12)


def _message_share(
    plan: Plan,
    programs: Sequence[Actions],
    numbering: Numbering,
    step_s: float,
    ranks_per_core: float,
) -> float:
    sizes = np.array([channel.size_bytes for channel in numbering.channels], dtype=float)
    largest = min(1.0, LARGEST_BYTES / sizes.max(initial=1.0))
    if ranks_per_core <= 1 or not len(sizes):
        return float(largest)
    sent = 0.0
    for rows in programs:
        sends = np.flatnonzero(rows.column("kind") == Kind.SEND_START)
        sent += float((sizes[rows.column("channel")[sends]] * shares(plan, rows)[sends]).sum())
    able = BYTES_PER_S * step_s * plan.ranks / ranks_per_core
    return float(min(largest, able / max(sent, 1.0)))


def _passage(stream: Stream) -> Passage:
    """Return the time of a full micro-batch; the parts of its way carry it at the same time."""
    hold_s = stream.pieces * max(stream.holds_s(1.0), default=0.0)
    return Passage(stream.size_bytes, hold_s, stream.latency_s)


def _meetings(plan: Plan, numbering: Numbering, streams: Sequence[Stream]) -> Iterator[Meeting]:
    """Yield the background operations of ranks for a stage, other than messages."""
    for index, stage in enumerate(plan.stages):
        ranks = stage.updating_ranks
        for rank in ranks if len(ranks) > 1 else ():
            passage = _passage(streams[len(numbering.channels) + index])
            yield Meeting(rank, "REDUCE", index, passage, ranks)
        for rank in ranks if stage.offload else ():
            for number, kind in enumerate(("OFFLOAD", "FETCH"), numbering.copies_of(index, rank)):
                yield Meeting(rank, kind, index, _passage(streams[number]), (rank,))
