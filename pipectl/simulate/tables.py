"""The tables of the event loop: what ranks execute, what it costs, and how far they are.

A table is an array of records, one per rank, stream and so on. A row of a program is (kind, stage,
stream, micro-batch, size). Stage and stream are indices local to the rank, so ranks that do the
same with different stages and streams share their rows.

A *stream* is a sequence of transfers along the same way: the messages of a channel, the sums of a
stage's gradients, or the copies of a stage's activations between device and host.
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
"""What a row works on: a full micro-batch, the last of the step, or ``SAMPLES + n`` samples. A row
holds the index of this among all that occur in a simulation: its *size*."""


RANK = record(
    "first end stages streams pool position waiting met has_computed",
    "speed update_s begin_s after_s since busy_s owed_s idle_s ended_s",
)
"""Of each rank:

- ``first``, ``end``: range of its program in the rows;
- ``stages``, ``streams``: its stage s is ``names[stages + s]`` of the plan; streams likewise;
- ``pool``: shared cores on which it computes; -1 if it has a core of its own;
- ``speed`` of its device; seconds of its update at speed 1, before its first row, and after a
  computation;
- ``position``: its row; ``since``: when it began the row, below 0 if it has not;
- ``waiting``: next rank that waits for the same transfer; the first one follows the last;
- ``met``: rank that was the n-th at a meeting, in the record of rank n;
- ``busy_s``: seconds of computations; ``owed_s``: time of rows to add to the next one;
- ``has_computed``: whether it has begun a computation; ``idle_s``: seconds that it waited before
  that, until its messages moved; ``ended_s``: end of its last row.
"""
STREAM_OF = record("first starters way end at_once", "latency_s")
"""Of each stream: its first transfer, the number of rows that must start a transfer before it
moves, the range of the parts of its way, whether these carry it independently, and its latency."""
TRANSFER = record("started waiting left", "moved_at over_at")
"""Of each transfer: the number of rows that have started it, the last rank that waits for it (-1 if
none does), the pieces that have not moved yet, its start and its end (infinite until its last piece
moves)."""
POOL = record("start cores busy alarm", "clock time")
"""Of each pool of cores: the start of its heap of work, the number of cores, the number of ranks
that compute, the number of its valid event, its virtual clock, and when that was set."""
EVENT = record("number target", "time")
"""An entry of a heap, sorted by time and then by a unique number."""
CLOCK = record("queued number met recorded meets", "now met_s agree_s")
"""Numbers of events in the queue, of events scheduled so far, of ranks that met, and of records;
whether ranks meet; the end of what is over, the last arrival at a meeting, and the seconds to agree
there."""
RECORD = record("rank row", "start end")
"""A row that took time."""

MEET = len(Kind)
"""A kind of row that only the simulator has: all ranks meet before UPDATE."""

COMPUTE, UPDATE, MEETING, START, WAIT = range(5)
"""What the event loop does with a row; the rank computes in those up to UPDATE."""

_STARTS = [kind for kind in Kind if kind.name.endswith("_START")]
OPERATIONS = np.full(len(Kind) + 1, WAIT, dtype=np.int64)
OPERATIONS[: Kind.SEND_START], OPERATIONS[Kind.UPDATE] = COMPUTE, UPDATE
OPERATIONS[_STARTS], OPERATIONS[MEET] = START, MEETING
"""Operation of each kind; MEET is the last."""

MESSAGE_ROWS = (Kind.SEND_START, Kind.SEND_WAIT, Kind.RECEIVE_START, Kind.RECEIVE_WAIT)
"""Rows that have times of their own; see :class:`pipectl.link.RowTimes`."""


class Programs(NamedTuple):
    """What every rank executes.

    Args:
        rows: of all different programs; shape [rows, 5].
        ranks: see ``RANK``; fields that do not describe programs are 0.
        names: stages and streams of the ranks, as indices in the plan.
        share: work and bytes of a row of each size, relative to a full micro-batch.
    """

    rows: Rows
    ranks: Records
    names: Integers
    share: Floats


class Network(NamedTuple):
    """The transfers and what carries them.

    Args:
        queues: queue of each part of a way; parts with the same queue take turns.
        hold_s: how long a piece of a transfer holds each part, by the size of its row; shape
            [parts, sizes].
    """

    streams: Records
    queues: Integers
    hold_s: Floats
    transfers: Records


class Tables(NamedTuple):
    """All tables of one simulation.

    Args:
        operation: by kind.
        work_s: seconds of a full micro-batch by kind and stage, on a device of speed 1.
        message_s: seconds of the rows of messages for a full micro-batch, by kind and stream; no
            columns if no rank has row times.
        free_at: when each queue of the network is free.
        queue: heap of events of ranks and (higher targets) pools, then streams whose next piece can
            move; void alarms stay until their time.
        work: heaps of the ranks that compute on each pool.
        clock: one record.
        records: empty if nothing is recorded.
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
