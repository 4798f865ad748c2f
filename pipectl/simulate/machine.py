"""The tables of a plan and a cluster for the event loop, and its results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.cluster import Cluster
from pipectl.errors import MismatchError, ScheduleError
from pipectl.link import FREE_ROWS, RowTimes, seconds_of
from pipectl.plan import Plan
from pipectl.schedule.actions import Actions, Kind
from pipectl.simulate import events
from pipectl.simulate.memory import amounts_of, peak_bytes
from pipectl.simulate.network import Numbering, streams_of, tables
from pipectl.simulate.rows import programs_of
from pipectl.simulate.tables import (
    CLOCK,
    EVENT,
    KIND,
    MESSAGE_ROWS,
    MICRO_BATCH,
    OPERATIONS,
    POOL,
    RECORD,
    STAGE,
    STREAM,
    Network,
    Programs,
    Rows,
    Tables,
)

Record = tuple[int, float, float, int, int, int, int]
"""Rank, start, end, kind, stage, micro-batch, channel."""

EVENTS_AT_ONCE = 100_000
"""Events per call of the compiled loop; between calls, Python handles signals."""


class Machine:
    """Ranks, links, cores and a queue of events.

    Args:
        programs: of every rank; by default the plan's own.
        steps: number of steps in the programs, executed as one.
        record: whether to keep the start and the end of every row.

    Raises:
        MismatchError: the plan uses nodes that the cluster lacks.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        programs: Sequence[Actions] | None = None,
        *,
        steps: int = 1,
        record: bool = False,
    ) -> None:
        used = 1 + max(plan.node_of_rank)
        if used > len(cluster.nodes):
            raise MismatchError(
                f"plan {plan.name!r} uses {used} nodes, cluster {cluster.name!r} has "
                f"{len(cluster.nodes)}",
                cure="plan again for this cluster",
            )
        numbering = Numbering(plan)
        self._plan, self._actions, self._connections = plan, programs, numbering.connections
        self.programs = programs_of(plan, numbering, programs)
        network = tables(streams_of(plan, cluster, numbering, steps), self.programs.share)
        self.tables = _new_tables(plan, cluster, numbering, self.programs, network, record=record)

    def run(self) -> float:
        """Execute everything; return the end of the last row, in seconds.

        Raises:
            ScheduleError: ranks wait forever.
        """
        while events.advance(self.tables, EVENTS_AT_ONCE):
            pass
        ranks = self.tables.ranks
        unfinished = np.flatnonzero(ranks["position"] < ranks["end"]).tolist()
        if unfinished:
            raise ScheduleError(
                f"plan {self._plan.name!r}: ranks {unfinished} wait forever",
                cure="plan again; a warm_up must not rise from a stage to the next",
            )
        return float(self.tables.clock["now"][0])

    def busy_s(self) -> list[float]:
        """Return the seconds in which each rank computes."""
        busy_s: list[float] = self.tables.ranks["busy_s"].tolist()
        return busy_s

    def peak_memory_bytes(self, process_baseline_bytes: int) -> tuple[int, ...]:
        """Return the peak bytes of each rank, including the process baseline."""
        amounts = amounts_of(self._plan, self._connections, self._actions or ())
        peaks = peak_bytes(self.programs, amounts)
        return tuple(process_baseline_bytes + round(peak) for peak in peaks.tolist())

    def records(self) -> list[Record]:
        """Return the rows that took time, by rank and start; empty unless they were recorded."""
        records = self.tables.records[: self.tables.clock["recorded"][0]]
        rows, ranks = self.programs.rows[records["row"]], self.programs.ranks[records["rank"]]
        names = self.programs.names

        def named(base: Integers, slots: Rows) -> Integers:
            """Return what the slots of ranks stand for in the plan; -1 stays -1."""
            places = np.minimum(base + slots, len(names) - 1)
            return np.where(slots < 0, -1, names[places])

        stage = named(ranks["stages"], rows[:, STAGE])
        stream = named(ranks["streams"], rows[:, STREAM])
        channel = np.where(stream < len(self._connections), stream, -1)
        times = records["rank"], records["start"], records["end"]
        columns = *times, rows[:, KIND], stage, rows[:, MICRO_BATCH], channel
        return sorted(zip(*(column.tolist() for column in columns), strict=True))


def _work_s(plan: Plan) -> Floats:
    """Return the seconds of a full micro-batch by kind and stage, on a device of speed 1."""
    work_s = np.zeros((len(Kind), len(plan.stages)))
    whole = [Kind.FORWARD, Kind.EVALUATE, Kind.RECOMPUTE, Kind.BACKWARD]
    for index, stage in enumerate(plan.stages):
        forward_s, cost = stage.cost.forward_s, stage.running
        work_s[whole, index] = cost.forward_s, forward_s, stage.recompute_s, cost.backward_s
        work_s[[Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT], index] = cost.halves_s
    return work_s


def _message_s(rows: Sequence[RowTimes], numbering: Numbering) -> Floats:
    """Return the seconds of the rows of messages for a full micro-batch, by kind and stream.

    Args:
        rows: row times of each rank.
    """
    if all(each is FREE_ROWS for each in rows):
        return np.zeros((len(Kind), 0))
    message_s = np.zeros((len(Kind), numbering.streams))
    for index, channel in enumerate(numbering.connections):
        if not channel.is_local:
            ends = rows[channel.source_rank], rows[channel.target_rank]
            known = (
                ends[0].send_start, ends[0].send_wait, ends[1].receive_start, ends[1].receive_wait
            )  # fmt: skip
            message_s[list(MESSAGE_ROWS), index] = [
                seconds_of(each, channel.size_bytes) for each in known
            ]
    return message_s


def _new_tables(
    plan: Plan,
    cluster: Cluster,
    numbering: Numbering,
    programs: Programs,
    network: Network,
    *,
    record: bool,
) -> Tables:
    """Return the tables at the start, when all ranks are about to begin, one after another."""
    nodes, cores = np.array(plan.node_of_rank), np.array([node.cores for node in cluster.nodes])
    ranks_of_node = np.bincount(nodes, minlength=len(cluster.nodes))
    crowded = ranks_of_node > cores
    pools = np.zeros(int(crowded.sum()), dtype=POOL)
    pools["cores"], shared = cores[crowded], ranks_of_node[crowded]
    pools["start"] = np.cumsum(shared) - shared
    ranks = programs.ranks.copy()
    ranks["pool"] = np.where(crowded, np.cumsum(crowded) - 1, -1)[nodes]
    row_times = [cluster.nodes[node].device.rows or FREE_ROWS for node in plan.node_of_rank]
    for stage in plan.stages:
        for rank in stage.updating_ranks:
            ranks["update_s"][rank] += stage.cost.update_s
    ranks["speed"] = [cluster.nodes[node].device.speed for node in plan.node_of_rank]
    ranks["update_s"] += [each.end for each in row_times] * ranks["speed"]
    ranks["begin_s"] = [each.begin for each in row_times]
    ranks["after_s"] = [each.compute for each in row_times]
    ranks["position"], ranks["since"] = ranks["first"], -1.0
    rows = ranks["end"] - ranks["first"]
    alarms = 2 * int(rows[ranks["pool"] >= 0].sum())  # at the start and the end of computations
    queue = np.zeros(len(ranks) + alarms, dtype=EVENT)
    queue["target"][: len(ranks)] = np.arange(len(ranks))
    queue["number"][: len(ranks)] = 1 + np.arange(len(ranks))
    clock = np.zeros(1, dtype=CLOCK)
    clock["queued"] = clock["number"] = len(ranks)
    clock["agree_s"] = max(each.agree for each in row_times)
    return Tables(
        *programs._replace(ranks=ranks),
        operation=OPERATIONS,
        work_s=_work_s(plan),
        message_s=_message_s(row_times, numbering),
        **network._asdict(),
        free_at=np.zeros(int(network.queues.max(initial=-1)) + 1),
        pools=pools,
        queue=queue,
        work=np.zeros(int(shared.sum()), dtype=EVENT),
        clock=clock,
        records=np.zeros(int(rows.sum()) if record else 0, dtype=RECORD),
    )
