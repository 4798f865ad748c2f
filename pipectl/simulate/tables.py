"""The tables the event loop works on: what ranks execute, what it costs, how far they are.

A table is an array of records, one for each rank, stream or whatever its name says. A row of a
program is (kind, stage, stream, micro-batch, size); stage and stream are indices among those the
rank knows, so ranks that do the same with other stages and streams share their rows.

A *stream* is a sequence of transfers that follow the same way: the messages of a channel, the
reduction of a stage's gradients, or the copies of a stage's activations between device and host.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl.arrays import Floats, Integers, Records, record
from pipectl.schedule.actions import Kind

Rows = npt.NDArray[np.int32]

KIND, STAGE, STREAM, MICRO_BATCH, SIZE = range(5)
"""Columns of a row."""

FULL, LAST, SAMPLES = range(3)
"""What a row works on: a full micro-batch, the step's last, or ``SAMPLES + n`` samples. Rows have
its place among those that occur in a simulation: their *size*."""


RANK = record(
    "first end stages streams pool position waiting met",
    "speed update_s begin_s after_s since busy_s owed_s",
)
"""Of every rank:

- ``first``, ``end``: where its program is in the rows;
- ``stages``, ``streams``: its stage s is ``names[stages + s]`` of the plan, streams likewise;
- ``pool``: the shared cores it computes on, -1 if it has a core of its own;
- ``speed`` of its device; seconds at speed 1 of its update, and before its first row and after a
  forward or backward;
- ``position``: its row; ``since``: when it began that, below 0 if it has not;
- ``waiting``: the next rank that waits for the same transfer, after the last the first;
- ``met``: the rank that came to a meeting in its place;
- ``busy_s``: seconds of computations; ``owed_s``: on shared cores, what its rows take, for the next
  computation.
"""
STREAM_OF = record("first starters way end", "latency_s")
"""Of every stream: its first transfer, the rows that must start a transfer before it moves, where
the parts of its way are, and what passes from the end of the last part to the arrival."""
TRANSFER = record("started waiting", "over_at")
"""Of every transfer: rows that have started it, the last rank that waits for it (-1 if none does),
and its end, infinite while it does not move."""
POOL = record("start cores busy alarm", "clock time")
"""Of every pool of cores: where its ranks are in the heap of work, the cores, the ranks that
compute, the number of its valid event, its virtual clock, and when that was set."""
EVENT = record("number target", "time")
"""An entry of a heap: by time, then by a number that no two entries share."""
CLOCK = record("queued number met recorded", "now met_s agree_s")
"""Events in the queue and foreseen so far, ranks that met, records; the end of what is over, when
the last rank that met came there, and how long all take to agree then."""
RECORD = record("rank row", "start end")
"""A row that took time."""

MEET = len(Kind)
"""A row of the simulator's own: all ranks meet before UPDATE."""

COMPUTE, UPDATE, MEETING, START, WAIT = range(5)
"""What the event loop does with a row; up to UPDATE the rank computes."""

_STARTS = [kind for kind in Kind if kind.name.endswith("_START")]
OPERATIONS = np.full(len(Kind) + 1, WAIT, dtype=np.int64)
OPERATIONS[: Kind.SEND_START], OPERATIONS[Kind.UPDATE] = COMPUTE, UPDATE
OPERATIONS[_STARTS], OPERATIONS[MEET] = START, MEETING
"""Operation of every kind, MEET last."""

MESSAGE_ROWS = (Kind.SEND_START, Kind.SEND_WAIT, Kind.RECEIVE_START, Kind.RECEIVE_WAIT)
"""Rows that take time of their own; see :class:`pipectl.link.RowTimes`."""


class Programs(NamedTuple):
    """What every rank executes.

    Args:
        rows: of all different programs; shape [rows, 5].
        ranks: see ``RANK``; what is not of programs is 0.
        names: what the stages and streams of ranks are in the plan.
        share: by the size of a row, its work and bytes over those of a full micro-batch.
    """

    rows: Rows
    ranks: Records
    names: Integers
    share: Floats


class Network(NamedTuple):
    """What moves and how.

    Args:
        queues: of every part of a way; parts with equal queues take turns.
        hold_s: how long a transfer holds every part, by the size of its row; shape [parts, sizes].
    """

    streams: Records
    queues: Integers
    hold_s: Floats
    transfers: Records


class Tables(NamedTuple):
    """Everything of one simulation.

    Args:
        operation: by kind.
        work_s: seconds of a full micro-batch by kind and stage, on a device of speed 1.
        message_s: seconds of the rows of messages for a full micro-batch, by kind and stream; no
            streams if no rows of any rank take time.
        free_at: of every queue of the network.
        queue: a heap of the events to come, of ranks, and after them of pools; alarms of pools
            that are void stay in it until their time.
        work: heaps of the ranks that compute on each pool.
        clock: one record.
        records: none if nothing is recorded.
    """

    rows: Rows
    ranks: Records
    names: Integers
    share: Floats
    operation: Integers
    work_s: Floats
    message_s: Floats
    streams: Records
    queues: Integers
    hold_s: Floats
    transfers: Records
    free_at: Floats
    pools: Records
    queue: Records
    work: Records
    clock: Records
    records: Records
