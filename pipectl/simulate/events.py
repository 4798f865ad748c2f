"""The event loop: executes the rows of all ranks in the order of time (compiled).

:mod:`pipectl.simulate.tables` describes the tables. The queue holds (time, number, and what goes
on: a rank, a pool of cores or a sum in pieces). Numbers ascend, so simultaneous events are
processed in the order in which they were scheduled.

Each part of a way carries one transfer at a time, in the order in which they were ready, for a time
that depends on the part's link and the bytes. A transfer starts on a part when it has started on
the previous part and the part is free. It is over one latency after all parts have carried it.
Parts work at the same time, like switches, and a fast part that waits for a slow one is free for
other transfers. A sum of gradients moves in pieces, each when all parts have carried the one
before; it starts on every part that is free, because its messages take many ways.

On nodes with fewer cores than ranks, n computing ranks each run at min(1, cores / n). Work is
measured on a virtual clock that runs at this rate, so a change of n moves the clock, not the end of
every rank's work.
"""

from __future__ import annotations

from math import inf
from typing import Any

from pipectl.arrays import Records
from pipectl.compiled import compiled
from pipectl.simulate.tables import (
    COMPUTE,
    KIND,
    MEETING,
    MICRO_BATCH,
    SIZE,
    STAGE,
    START,
    STREAM,
    UPDATE,
    WAIT,
    Tables,
)


@compiled
def advance(tables: Tables, events: int) -> int:
    """Process at most so many events; return the number of events in the queue."""
    clock, queue, pools, count = tables.clock[0], tables.queue, tables.pools, len(tables.ranks)
    for _ in range(events):
        if clock.queued == 0:
            break
        now, number, item = queue[0].time, queue[0].number, queue[0].target
        drop_first(queue, 0, clock.queued)
        clock.queued -= 1
        if item >= count + len(pools):
            _move(tables, item - count - len(pools), 0, 0, now)
            continue
        if item >= count:
            pool = item - count
            if pools[pool].alarm != number:
                continue
            work, first = tables.work, pools[pool].start
            item = work[first].target  # the lowest rank if several end now
            pools[pool].clock, pools[pool].time = work[first].time, now
            drop_first(work, first, pools[pool].busy)
            pools[pool].busy -= 1
            _set_alarm(tables, pool)
        clock.now = max(clock.now, now)
        _go_on(tables, item, now)
    return int(clock.queued)


@compiled
def _go_on(tables: Tables, number: int, event_s: float) -> None:
    """Execute rows of a rank until one takes time.

    After a wait or a computation, a rank spends time that concerns no other rank and runs ahead of
    the queue. A transfer, which others see, starts only when the queue has reached its time.
    """
    rank, rows = tables.ranks[number], tables.rows
    begun, position = rank.since, rank.position
    now = max(event_s, begun)
    if begun < 0 and position == rank.first:
        now += _own_s(rank, rank.begin_s)
    while position < rank.end:
        kind = rows[position, KIND]
        operation, stream, row_s = tables.operation[kind], 0, 0.0
        if operation >= START:
            stream = tables.names[rank.streams + rows[position, STREAM]]
            if tables.message_s.shape[1] > 0:
                row_s = tables.message_s[kind, stream] * tables.share[rows[position, SIZE]]
        if _begin_row(tables, number, position, operation, stream, row_s, begun, now, event_s):
            rank.position = position
            rank.since = now if begun < 0 else begun
            return
        if operation == START:
            _start(tables, position, stream, now)
        after = now
        if operation == WAIT:
            after += _own_s(rank, row_s)
        if begun >= 0 or after > now:
            rank.busy_s += now - begun if operation <= UPDATE else 0.0
            _record(tables.records, tables.clock[0], number, position, begun, now, after)
        if operation == COMPUTE:
            after += _own_s(rank, rank.after_s)
        now, begun = after, -1.0
        position += 1
    rank.position = position
    rank.since = -1.0
    rank.ended_s = now
    tables.clock[0].now = max(tables.clock[0].now, now)


@compiled
def _begin_row(
    tables: Tables,
    number: int,
    position: int,
    operation: int,
    stream: int,
    row_s: float,
    begun: float,
    now: float,
    event_s: float,
) -> bool:
    """Return whether a row is not over yet; the rank continues when it is over.

    Args:
        begun: when the rank began the row; below 0 if it has not.
    """
    ranks, queue, clock = tables.ranks, tables.queue, tables.clock[0]
    if operation == WAIT:
        transfer = tables.streams[stream].first + 1 + tables.rows[position, MICRO_BATCH]
        end = tables.transfers[transfer].over_at
        if end <= now:
            if begun >= 0 and ranks[number].has_computed == 0:
                ranks[number].idle_s += max(0.0, tables.transfers[transfer].moved_at - begun)
            return False
        if end < inf:
            _foresee(queue, clock, end, number)
        else:
            _wait(tables.transfers[transfer], ranks, number)
        return True
    if begun >= 0:
        return False
    if operation == START:
        end = now + _own_s(ranks[number], row_s)
        if end <= event_s:
            return False
        _foresee(queue, clock, end, number)
    elif operation == MEETING:
        if clock.meets == 0:
            return False
        _meet(ranks, queue, clock, number, now)
    else:
        _compute(tables, number, position, operation, now)
    return True


@compiled
def _own_s(rank: Any, time_s: float) -> float:
    """Return the time by which a rank runs ahead; on shared cores, defer it and return 0."""
    if rank.pool < 0:
        return time_s
    rank.owed_s += time_s
    return 0.0


@compiled
def _record(
    records: Records,
    clock: Any,
    number: int,
    position: int,
    begun: float,
    now: float,
    after: float,
) -> None:
    if len(records):
        record = records[clock.recorded]
        record.rank, record.row = number, position
        record.start, record.end = begun if begun >= 0 else now, after
        clock.recorded += 1


@compiled
def _foresee(queue: Records, clock: Any, time: float, item: int) -> None:
    """Schedule an event."""
    clock.number += 1
    push(queue, 0, clock.queued, time, clock.number, item)
    clock.queued += 1


@compiled
def _wait(transfer: Any, ranks: Records, number: int) -> None:
    """Append a rank to those that wait for a transfer."""
    last = transfer.waiting
    ranks[number].waiting = number if last < 0 else ranks[last].waiting
    if last >= 0:
        ranks[last].waiting = number
    transfer.waiting = number


@compiled
def _start(tables: Tables, position: int, number: int, now: float) -> None:
    """Start a transfer; it moves when all of its ends have started it."""
    stream, row = tables.streams[number], tables.rows[position]
    which = 1 + row[MICRO_BATCH]
    transfer = tables.transfers[stream.first + which]
    transfer.started += 1
    if transfer.started == stream.starters:
        transfer.moved_at = now
        _move(tables, number, which, row[SIZE], now)


@compiled
def _move(tables: Tables, number: int, which: int, size: int, now: float) -> None:
    """Move the next piece of a transfer; its last one lets those go on that wait.

    Args:
        number: of the stream.
        which: of its transfers.
        size: of the row.
    """
    stream = tables.streams[number]
    transfer = tables.transfers[stream.first + which]
    begun, end = now, now
    for place in range(stream.way, stream.end):
        queue = tables.queues[place]
        begun = max(now if stream.at_once else begun, tables.free_at[queue])
        over = begun + tables.hold_s[place, size]
        tables.free_at[queue] = over
        end = max(end, over)
    transfer.left -= 1
    if transfer.left > 0:
        _foresee(tables.queue, tables.clock[0], end, len(tables.ranks) + len(tables.pools) + number)
        return
    transfer.over_at = end + stream.latency_s
    last = transfer.waiting
    if last >= 0:
        waiting = tables.ranks[last].waiting
        while waiting != last:
            _foresee(tables.queue, tables.clock[0], transfer.over_at, waiting)
            waiting = tables.ranks[waiting].waiting
        _foresee(tables.queue, tables.clock[0], transfer.over_at, last)


@compiled
def _meet(ranks: Records, queue: Records, clock: Any, number: int, now: float) -> None:
    """Let all ranks continue when the last one is there and they have agreed."""
    ranks[clock.met].met = number
    clock.met += 1
    clock.met_s = max(clock.met_s, now)
    if clock.met == len(ranks):
        for place in range(len(ranks)):
            _foresee(queue, clock, clock.met_s + clock.agree_s, ranks[place].met)
        clock.met = 0


@compiled
def _compute(tables: Tables, number: int, position: int, operation: int, now: float) -> None:
    """Begin a computation; the rank continues at its end."""
    rank, row, pools = tables.ranks[number], tables.rows[position], tables.pools
    rank.has_computed = 1
    if operation == UPDATE:
        work_s = rank.update_s / rank.speed
    else:
        stage = tables.names[rank.stages + row[STAGE]]
        work_s = tables.work_s[row[KIND], stage] / rank.speed
        work_s *= tables.share[row[SIZE]]
    if rank.pool < 0:
        _foresee(tables.queue, tables.clock[0], now + work_s, number)
        return
    work_s += rank.owed_s
    rank.owed_s = 0.0
    pool = pools[rank.pool]
    pool.clock += (now - pool.time) * _rate(pool)
    pool.time = now
    push(tables.work, pool.start, pool.busy, pool.clock + work_s, number, number)
    pool.busy += 1
    _set_alarm(tables, rank.pool)


@compiled
def _set_alarm(tables: Tables, number: int) -> None:
    """Schedule the end of a pool's next work and void the pool's older alarms."""
    pool, clock = tables.pools[number], tables.clock[0]
    pool.alarm = clock.number + 1
    if pool.busy:
        left_s = max(0.0, tables.work[pool.start].time - pool.clock)
        end = pool.time + left_s / _rate(pool)
        _foresee(tables.queue, clock, end, len(tables.ranks) + number)
    else:
        clock.number += 1


@compiled
def _rate(pool: Any) -> float:
    return min(1.0, float(pool.cores / max(1, pool.busy)))


@compiled
def _put(heap: Records, place: int, time: float, number: int, item: int) -> None:
    entry = heap[place]
    entry.time, entry.number, entry.target = time, number, item


@compiled
def push(heap: Records, base: int, size: int, time: float, number: int, item: int) -> None:
    """Add an entry to the heap of ``size`` entries that starts at index ``base``."""
    place = size
    while place > 0:
        above = (place - 1) >> 1
        other = heap[base + above]
        if other.time < time or (other.time == time and other.number < number):
            break
        _put(heap, base + place, other.time, other.number, other.target)
        place = above
    _put(heap, base + place, time, number, item)


@compiled
def drop_first(heap: Records, base: int, size: int) -> None:
    """Remove the first entry of the heap of ``size`` entries that starts at index ``base``."""
    last = heap[base + size - 1]
    place, below = 0, 1
    while below < size - 1:
        lower, other = heap[base + below], heap[base + below + 1]
        if below + 1 < size - 1 and (
            other.time < lower.time or (other.time == lower.time and other.number < lower.number)
        ):
            below += 1
            lower = other
        if last.time < lower.time or (last.time == lower.time and last.number < lower.number):
            break
        _put(heap, base + place, lower.time, lower.number, lower.target)
        place = below
        below = 2 * place + 1
    _put(heap, base + place, last.time, last.number, last.target)
