"""The arrays the event loop works on: what ranks execute, what it costs, how far they are.

A row of a program is (kind, stage, stream, micro-batch, size). Stage and stream are indices among
those the rank knows, so ranks that do the same with other stages and streams share their rows.

A *stream* is a sequence of transfers that follow the same way: the messages of a channel, the
reduction of a stage's gradients, or the copies of a stage's activations between device and host.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl.arrays import Floats, Integers
from pipectl.plan import Plan
from pipectl.schedule.actions import Kind

Rows = npt.NDArray[np.int32]

KIND, STAGE, STREAM, MICRO_BATCH, SIZE = range(5)
"""Columns of a row."""

FULL, LAST, SAMPLES = range(3)
"""Sizes of what a row works on: a full micro-batch, the step's last, or ``SAMPLES + n`` samples."""


def shares(plan: Plan) -> Floats:
    """By the size of a row, what it works on over a full micro-batch."""
    found = np.arange(-SAMPLES, plan.micro_batch_size + 1) / plan.micro_batch_size
    found[:SAMPLES] = 1.0, plan.micro_batch_shares[-1]
    return found


MEET = len(Kind)
"""A row of the simulator's own: all ranks meet before UPDATE."""

COMPUTE, UPDATE, MEETING, START, WAIT = range(5)
"""What the event loop does with a row; up to UPDATE the rank computes."""


def _operation(kind: Kind) -> int:
    if kind.is_compute:
        return UPDATE if kind is Kind.UPDATE else COMPUTE
    return START if kind.name.endswith("_START") else WAIT


OPERATIONS = np.array([*map(_operation, Kind), MEETING], dtype=np.int64)
"""Operation of every kind, MEET last."""

MESSAGE_ROWS = (Kind.SEND_START, Kind.SEND_WAIT, Kind.RECEIVE_START, Kind.RECEIVE_WAIT)
"""Rows that take time of their own; see :class:`pipectl.link.RowTimes`."""


class Programs(NamedTuple):
    """What every rank executes.

    Args:
        rows: of all different programs; shape [rows, 5].
        first, end: where each rank's program is in them.
        stages, stage_base: a rank's stage s is ``stages[stage_base[rank] + s]`` of the plan.
        streams, stream_base: the same of streams.
        operation: by kind.
    """

    rows: Rows
    first: Integers
    end: Integers
    stages: Integers
    stage_base: Integers
    streams: Integers
    stream_base: Integers
    operation: Integers


class Costs(NamedTuple):
    """What computing takes.

    Args:
        work_s: seconds of a full micro-batch by kind and stage, on a device of speed 1.
        update_s: of every rank, on a device of speed 1.
        speed: of every rank's device.
        share: by the size of a row, its work and bytes over those of a full micro-batch.
        pool: of every rank, the shared cores it computes on; -1 if it has a core of its own.
        pool_cores: cores of every pool.
        pool_base: where the ranks that compute on a pool are in the arrays of :class:`State`.
        message_row: by kind, its place in ``MESSAGE_ROWS``; -1 for others.
        message_s: seconds of these rows for a full micro-batch, by place and stream; no streams if
            no rows of any rank take time.
        after_s: of every rank, from a forward or backward to the next row.
        begin_s: of every rank, before its first row.
        agree_s: from when the last rank comes to its update until all go on.
    """

    work_s: Floats
    update_s: Floats
    speed: Floats
    share: Floats
    pool: Integers
    pool_cores: Integers
    pool_base: Integers
    message_row: Integers
    message_s: Floats
    after_s: Floats
    begin_s: Floats
    agree_s: float


class Network(NamedTuple):
    """What moves and how.

    Args:
        first_transfer: index of the first transfer of every stream.
        starters: how many rows must have started a transfer before it moves.
        size_bytes: of a full micro-batch, by stream.
        latency_s: from the end of the last part of its way to its arrival, by stream.
        way: where the parts of each stream's way begin; one entry more than streams.
        queue: what each part is shared with: parts with equal numbers take turns.
        link: index of each part's link.
        link_bandwidth, link_latency_s: by link.
        timing: where each link's measured times begin; one entry more than links.
        timing_bytes, timing_s: measured times by size.
    """

    first_transfer: Integers
    starters: Integers
    size_bytes: Floats
    latency_s: Floats
    way: Integers
    queue: Integers
    link: Integers
    link_bandwidth: Floats
    link_latency_s: Floats
    timing: Integers
    timing_bytes: Floats
    timing_s: Floats


class Heap(NamedTuple):
    """A binary heap, ordered by time, then by a number that no two entries share."""

    time: Floats
    number: Integers
    item: Integers


QUEUED, NUMBER, MET, RECORDED, COUNTERS = range(5)
"""Indices of ``State.counter``: events in the queue, foreseen so far, ranks that met, records."""


class State(NamedTuple):
    """How far everything is.

    Args:
        now: the end of what is over, and when the last rank that met came there.
        counter: see ``COUNTERS``.
        position, since: of every rank, its row, and when it began that; below 0 if it has not.
        busy_s: of every rank.
        owed_s: of every rank on shared cores, what its rows take, for the next computation.
        started: of every transfer, how many rows have started it.
        over_at: of every transfer; infinite while it does not move.
        waiting: of every transfer, the last rank that waits for it, -1 if none does.
        next_waiting: of every waiting rank, the next one, after the last the first.
        free_at: of every queue of the network.
        met: ranks that met, in order.
        events: to come, of ranks, and after them of pools.
        pool_size, pool_clock, pool_time, pool_alarm: of every pool of cores: ranks that compute,
            its virtual clock, when that was set, and the number of its valid event.
        work: heaps of the ranks that compute on each pool.
        recorded: start and end of rows that took time; no rows if nothing is recorded.
        recorded_row: rank and row of each.
    """

    now: Floats
    counter: Integers
    position: Integers
    since: Floats
    busy_s: Floats
    owed_s: Floats
    started: Rows
    over_at: Floats
    waiting: Integers
    next_waiting: Integers
    free_at: Floats
    met: Integers
    events: Heap
    pool_size: Integers
    pool_clock: Floats
    pool_time: Floats
    pool_alarm: Integers
    work: Heap
    recorded: Floats
    recorded_row: Integers


def new_state(programs: Programs, costs: Costs, network: Network, *, record: bool) -> State:
    """Nothing has happened yet, and all ranks are about to begin, one after the other.

    Args:
        record: whether to keep when every row began and ended.
    """
    ranks, pools = len(programs.first), len(costs.pool_cores)
    transfers = int(network.first_transfer[-1])
    events = 2 * (ranks + pools)
    counter = np.zeros(COUNTERS, dtype=np.int64)
    counter[[QUEUED, NUMBER]] = ranks
    shared = int(costs.pool_base[-1])
    rows = int((programs.end - programs.first).sum()) if record else 0
    return State(
        now=np.zeros(2),
        counter=counter,
        position=programs.first.copy(),
        since=np.full(ranks, -1.0),
        busy_s=np.zeros(ranks),
        owed_s=np.zeros(ranks),
        started=np.zeros(transfers, dtype=np.int32),
        over_at=np.full(transfers, np.inf),
        waiting=np.full(transfers, -1, dtype=np.int64),
        next_waiting=np.zeros(ranks, dtype=np.int64),
        free_at=np.zeros(int(network.queue.max(initial=-1)) + 1),
        met=np.zeros(ranks, dtype=np.int64),
        events=Heap(np.zeros(events), np.arange(1, events + 1), np.arange(events)),
        pool_size=np.zeros(pools, dtype=np.int64),
        pool_clock=np.zeros(pools),
        pool_time=np.zeros(pools),
        pool_alarm=np.zeros(pools, dtype=np.int64),
        work=Heap(np.zeros(shared), *np.zeros((2, shared), dtype=np.int64)),
        recorded=np.zeros((rows, 2)),
        recorded_row=np.zeros((rows, 2), dtype=np.int64),
    )
