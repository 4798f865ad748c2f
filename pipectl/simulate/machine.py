"""What the event loop needs of a plan and a cluster, and what it found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.cluster import Cluster
from pipectl.errors import ScheduleError
from pipectl.link import FREE_ROWS, RowTimes, seconds_of
from pipectl.plan import Plan, Stage
from pipectl.schedule.actions import Kind, Program
from pipectl.simulate import events
from pipectl.simulate.memory import amounts_of, peak_bytes
from pipectl.simulate.network import Numbering, streams_of, tables
from pipectl.simulate.rows import flatten, given_parts, parts_of
from pipectl.simulate.tables import (
    KIND,
    MESSAGE_ROWS,
    MICRO_BATCH,
    OPERATIONS,
    RECORDED,
    STAGE,
    STREAM,
    Costs,
    Rows,
    new_state,
    shares,
)

Record = tuple[int, float, float, int, int, int, int]
"""Rank, start, end, kind, stage, micro-batch, channel."""

EVENTS_AT_ONCE = 100_000
"""After so many, the compiled loop returns to Python, which looks at signals."""


class Machine:
    """Ranks, links and cores, and a queue of events.

    Args:
        programs: of every rank; only their bodies are executed. By default the plan's own.
        record: whether to keep when every row began and ended.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        programs: Sequence[Program] | None = None,
        *,
        record: bool = False,
    ) -> None:
        numbering = Numbering(plan)
        self._plan, self._given, self._connections = plan, programs, numbering.connections
        self.programs = flatten(
            parts_of(plan, numbering)
            if programs is None
            else given_parts(plan, numbering, programs)
        )
        self.costs = costs_of(plan, cluster, numbering)
        self.network = tables(streams_of(plan, cluster, numbering))
        self.state = new_state(self.programs, self.costs, self.network, record=record)

    def run(self) -> float:
        """Execute everything; returns the end of the last row.

        Raises:
            ScheduleError: ranks wait for ever.
        """
        arrays = self.programs, self.costs, self.network, self.state
        while events.advance(*arrays, EVENTS_AT_ONCE):
            pass
        unfinished = np.flatnonzero(self.state.position < self.programs.end).tolist()
        if unfinished:
            raise ScheduleError(
                f"plan {self._plan.name!r}: ranks {unfinished} wait for ever",
                cure="plan again; a warm_up must not rise from a stage to the next",
            )
        return float(self.state.now[0])

    def busy_s(self) -> list[float]:
        """Seconds each rank computes."""
        found: list[float] = self.state.busy_s.tolist()
        return found

    def peak_memory_bytes(self, process_baseline_bytes: int) -> tuple[int, ...]:
        """The most each rank holds at once, the process included."""
        actions = [program.body for program in self._given or ()]
        amounts = amounts_of(self._plan, self._connections, actions)
        found = peak_bytes(self.programs, self.costs.share, amounts)
        return tuple(process_baseline_bytes + round(peak) for peak in found.tolist())

    def records(self) -> list[Record]:
        """What took time, by rank and start; nothing if it was not recorded."""
        count = self.state.counter[RECORDED]
        rank, position = self.state.recorded_row[:count].T
        start, end = self.state.recorded[:count].T
        used = [KIND, STAGE, MICRO_BATCH, STREAM]
        kind, stage, micro_batch, stream = self.programs.rows[position][:, used].T
        stage = _named(self.programs.stages, self.programs.stage_base[rank], stage)
        stream = _named(self.programs.streams, self.programs.stream_base[rank], stream)
        channel = np.where(stream < len(self._connections), stream, -1)
        columns = rank, start, end, kind, stage, micro_batch, channel
        return sorted(zip(*(column.tolist() for column in columns), strict=True))


def _named(known: Integers, base: Integers, slots: Rows) -> Integers:
    """What slots of ranks stand for; -1 stays."""
    if not len(known):
        return np.full(len(slots), -1)
    found: Integers = np.where(slots < 0, -1, known[np.minimum(base + slots, len(known) - 1)])
    return found


def costs_of(plan: Plan, cluster: Cluster, numbering: Numbering) -> Costs:
    """What computing, and the rows of programs, take on a cluster."""
    work_s = np.zeros((len(Kind), len(plan.stages)))
    for index, stage in enumerate(plan.stages):
        for kind, time_s in _works(stage):
            work_s[kind, index] = time_s
    update_s = np.zeros(plan.ranks)
    for stage in plan.stages:
        for rank in stage.updating_ranks:
            update_s[rank] += stage.cost.update_s
    speeds = np.array([node.device.speed for node in cluster.nodes])
    nodes = np.array(plan.node_of_rank, dtype=np.int64)
    ranks = np.bincount(nodes, minlength=len(cluster.nodes))
    cores = np.array([node.cores for node in cluster.nodes], dtype=np.int64)
    crowded = ranks > cores
    pools = np.where(crowded, np.cumsum(crowded) - 1, -1)
    rows = [cluster.nodes[node].device.rows or FREE_ROWS for node in plan.node_of_rank]
    message_row = np.full(len(OPERATIONS), -1, dtype=np.int64)
    message_row[list(MESSAGE_ROWS)] = range(len(MESSAGE_ROWS))
    return Costs(
        work_s=work_s,
        update_s=update_s + [each.end for each in rows] * speeds[nodes],
        speed=speeds[nodes],
        share=shares(plan),
        pool=pools[nodes],
        pool_cores=cores[crowded],
        pool_base=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(ranks[crowded])]),
        message_row=message_row,
        message_s=_message_rows(rows, numbering),
        after_s=np.array([each.compute for each in rows]),
        begin_s=np.array([each.begin for each in rows]),
        agree_s=max(each.agree for each in rows),
    )


def _message_rows(rows: Sequence[RowTimes], numbering: Numbering) -> Floats:
    """Seconds of the rows of every message; see :class:`Costs`."""
    if all(each is FREE_ROWS for each in rows):
        return np.zeros((len(MESSAGE_ROWS), 0))
    found = np.zeros((len(MESSAGE_ROWS), numbering.streams))
    for index, channel in enumerate(numbering.connections):
        if not channel.is_local:
            ends = rows[channel.source_rank], rows[channel.target_rank]
            tables = (
                ends[0].send_start, ends[0].send_wait, ends[1].receive_start, ends[1].receive_wait
            )  # fmt: skip
            found[:, index] = [seconds_of(table, channel.size_bytes) for table in tables]
    return found


def _works(stage: Stage) -> Iterator[tuple[Kind, float]]:
    """Seconds of the kinds of computation."""
    cost = stage.running
    input_s, weight_s = cost.halves_s
    yield Kind.FORWARD, cost.forward_s
    yield Kind.EVALUATE, stage.cost.forward_s
    yield Kind.RECOMPUTE, stage.recompute_s
    yield Kind.BACKWARD, cost.backward_s
    yield Kind.BACKWARD_INPUT, input_s
    yield Kind.BACKWARD_WEIGHT, weight_s
