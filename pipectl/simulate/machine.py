"""The event loop that executes rank programs."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from pipectl.cluster import Cluster
from pipectl.plan import Plan
from pipectl.schedule.actions import Action, Kind, Program
from pipectl.schedule.channel import channels
from pipectl.simulate.resources import SharedCores, link_queues, shared_cores

MEET = len(Kind)
"""A row of the simulator's own: all ranks meet before UPDATE."""

Row = tuple[int, int, int, int]
Record = tuple[int, float, float, int, int, int]
"""Rank, start, end, kind, stage, micro-batch."""

# Plain integers: comparing with enum members would take most of the loop's time.
_STARTS = int(Kind.SEND_START), int(Kind.RECEIVE_START)
_WAITS = int(Kind.SEND_WAIT), int(Kind.RECEIVE_WAIT)
_FIRST_TRANSFER = int(Kind.SEND_START)
_UPDATE = int(Kind.UPDATE)
_UNBEGUN = -1.0


class Machine:
    """Ranks, links and cores, and a queue of (time, number, rank) in which ranks go on.

    Args:
        programs: of every rank; only their bodies are executed.
    """

    def __init__(self, plan: Plan, cluster: Cluster, programs: Sequence[Program]) -> None:
        self.rows = [_rows(program) for program in programs]
        self.shares = (*plan.micro_batch_shares, 1.0)
        self.work_s = [_work(plan, cluster, rank) for rank in range(plan.ranks)]
        connections = channels(plan)
        self.sizes = [channel.size_bytes for channel in connections]
        self.links = link_queues(plan, cluster, connections)
        self.cores = shared_cores(plan, cluster)
        self.alarms: dict[SharedCores, int] = {}
        self.started = bytearray(len(connections) * plan.micro_batches)
        self.over_at = [inf] * len(self.started)
        self.waiting: dict[int, list[int]] = {}
        self.meeting: list[int] = []
        self.position = [0] * plan.ranks
        self.since = [_UNBEGUN] * plan.ranks
        self.busy_s = [0.0] * plan.ranks
        self.records: list[Record] = []
        self.queue: list[tuple[float, int, int, SharedCores | None]] = []
        self.number = 0

    def run(self) -> float:
        """Execute everything that can be; returns the end of the last row."""
        now = 0.0
        for rank in range(len(self.rows)):
            self._go_on(rank, now)
        while self.queue:
            now, number, rank, cores = heappop(self.queue)
            if cores is None:
                self._go_on(rank, now)
            elif self.alarms[cores] == number:
                rank = cores.finish(now)
                self._set_alarm(cores)
                self._go_on(rank, now)
        return now

    def unfinished(self) -> list[int]:
        """Ranks that still wait."""
        return [rank for rank, rows in enumerate(self.rows) if self.position[rank] < len(rows)]

    def _go_on(self, rank: int, now: float) -> None:
        """Execute rows of a rank until one takes time."""
        rows, begun = self.rows[rank], self.since[rank]
        for position in range(self.position[rank], len(rows)):
            kind, stage, micro_batch, channel = rows[position]
            if kind in _STARTS:
                self._start(channel, micro_batch, now)
                continue
            if kind in _WAITS:
                pending = self._is_pending(rank, channel, micro_batch, now)
            else:
                pending = begun < 0 and self._begin(rank, kind, stage, micro_batch, now)
            if pending:
                self.position[rank], self.since[rank] = position, now
                return
            if begun >= 0:
                self.records.append((rank, begun, now, kind, stage, micro_batch))
                if kind < _FIRST_TRANSFER:
                    self.busy_s[rank] += now - begun
                begun = _UNBEGUN
        self.position[rank] = len(rows)

    def _wake(self, rank: int, time: float) -> None:
        self.number += 1
        heappush(self.queue, (time, self.number, rank, None))

    def _start(self, channel: int, micro_batch: int, now: float) -> None:
        """One end starts a message; it moves once both have."""
        message = channel * (len(self.shares) - 1) + micro_batch
        if not self.started[message]:
            self.started[message] = 1
            return
        link = self.links[channel]
        assert link is not None, "local channels have no rows"
        end = link.carry(self.sizes[channel] * self.shares[micro_batch], now)
        self.over_at[message] = end
        for rank in self.waiting.pop(message, ()):
            self._wake(rank, end)

    def _is_pending(self, rank: int, channel: int, micro_batch: int, now: float) -> bool:
        """Whether a rank must wait for a message; it is woken when that is over."""
        message = channel * (len(self.shares) - 1) + micro_batch
        end = self.over_at[message]
        if end <= now:
            return False
        if end == inf:
            self.waiting.setdefault(message, []).append(rank)
        else:
            self._wake(rank, end)
        return True

    def _begin(self, rank: int, kind: int, stage: int, micro_batch: int, now: float) -> bool:
        """Begin a computation or the meeting before UPDATE; the rank is woken at its end."""
        if kind == MEET:
            self.meeting.append(rank)
            if len(self.meeting) == len(self.rows):
                for waiting in self.meeting:
                    self._wake(waiting, now)
                self.meeting = []
            return True
        work_s = self.work_s[rank][kind, stage] * self.shares[micro_batch]
        cores = self.cores[rank]
        if cores is None:
            self._wake(rank, now + work_s)
        else:
            cores.start(rank, work_s, now)
            self._set_alarm(cores)
        return True

    def _set_alarm(self, cores: SharedCores) -> None:
        """Have the queue return to shared cores when their next work ends; voids older alarms."""
        self.number += 1
        self.alarms[cores] = self.number
        time = cores.next_end()
        if time is not None:
            heappush(self.queue, (time, self.number, -1, cores))


def _rows(program: Program) -> list[Row]:
    """The columns the loop reads, as tuples, with a meeting before every UPDATE."""
    rows: list[Row] = []
    fields = [Action._fields.index(name) for name in ("kind", "stage", "micro_batch", "channel")]
    for row in program.body.rows[:, fields].tolist():
        if row[0] == _UPDATE:
            rows.append((MEET, *row[1:]))
        rows.append(tuple(row))
    return rows


def _work(plan: Plan, cluster: Cluster, rank: int) -> dict[tuple[int, int], float]:
    """Seconds of every (kind, stage) of a rank on its device."""
    speed = cluster.nodes[plan.node_of_rank[rank]].device.speed
    stages = plan.stages_of_rank(rank)
    work: dict[tuple[int, int], float] = {}
    for stage in stages:
        cost = plan.stages[stage].cost
        work[Kind.FORWARD, stage] = work[Kind.EVALUATE, stage] = cost.forward_s / speed
        work[Kind.BACKWARD, stage] = cost.backward_s / speed
    update_s = sum(plan.stages[stage].cost.update_s for stage in stages)
    work[_UPDATE, stages[0] if stages else -1] = update_s / speed
    return work
