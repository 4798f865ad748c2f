"""The event loop: executes the rows of all ranks in the order of time.

Compiled; the arrays are described in :mod:`pipectl.simulate.tables`. The queue holds (time, number,
rank or pool of cores); numbers rise with every event foreseen, so events at one time are taken in
the order they were foreseen.

Every part of a way carries one transfer at a time, in the order in which they were ready, for a
time that depends on the part's link and the bytes. A transfer begins on a part when it has begun on
the one before and the part is free, and is over a latency after all parts have carried it: parts
work at once, as the switches of a network do, and a fast part that waits for a slow one is free for
others.

On nodes with fewer cores than ranks, n computing ranks each run at min(1, cores / n). Work is
measured on a virtual clock that runs at this rate, so a change of n moves the clock and not the end
of every rank's work. ``pool`` is the index of such a node.
"""

from __future__ import annotations

from math import inf

import numpy as np

from pipectl.arrays import Floats
from pipectl.compiled import compiled_in_place, part_of_kernel
from pipectl.simulate.tables import (
    COMPUTE,
    KIND,
    MEETING,
    MET,
    MICRO_BATCH,
    NUMBER,
    QUEUED,
    RECORDED,
    SIZE,
    STAGE,
    START,
    STREAM,
    UPDATE,
    WAIT,
    Costs,
    Heap,
    Network,
    Programs,
    State,
)


@compiled_in_place
def advance(programs: Programs, costs: Costs, network: Network, state: State, events: int) -> int:
    """Take the next events, at most so many; returns how many are known to come."""
    ranks = len(programs.first)
    for _ in range(events):
        if state.counter[QUEUED] == 0:
            break
        first = state.events
        now, number, item = first.time[0], first.number[0], first.item[0]
        drop_first(state.events, 0, state.counter[QUEUED])
        state.counter[QUEUED] -= 1
        if item < ranks:
            state.now[0] = max(state.now[0], now)
            _go_on(programs, costs, network, state, item, now)
        elif state.pool_alarm[item - ranks] == number:
            state.now[0] = max(state.now[0], now)
            rank = end_work(costs, state, item - ranks, now)
            _set_alarm(costs, state, item - ranks)
            _go_on(programs, costs, network, state, rank, now)
    return int(state.counter[QUEUED])


@part_of_kernel
def _go_on(
    programs: Programs, costs: Costs, network: Network, state: State, rank: int, event_s: float
) -> None:
    """Execute rows of a rank until one takes time.

    What follows a wait or a computation takes time of the rank alone, by which it runs ahead of the
    queue; what others see, the start of a transfer, happens when the queue is there, too.
    """
    begun = state.since[rank]
    now = max(event_s, begun)
    position = state.position[rank]
    if begun < 0 and position == programs.first[rank]:
        now += _own_s(costs, state, rank, costs.begin_s[rank])
    while position < programs.end[rank]:
        operation = programs.operation[programs.rows[position, KIND]]
        pending = begun < 0
        if operation == WAIT:
            pending = _is_pending(programs, network, state, rank, position, now)
        elif operation == START and begun < 0:
            end = now + _row_s(programs, costs, state, rank, position)
            pending = end > event_s
            if pending:
                _foresee(state, end, rank)
        elif operation == MEETING and begun < 0:
            _meet(costs, state, rank, now)
        elif begun < 0:
            _compute(programs, costs, state, rank, position, now)
        if pending:
            state.position[rank] = position
            state.since[rank] = now if begun < 0 else begun
            return
        if operation == START:
            _start(programs, costs, network, state, rank, position, now)
        now = _end_row(programs, costs, state, rank, position, begun, now)
        begun = -1.0
        position += 1
    state.position[rank] = position
    state.since[rank] = -1.0
    state.now[0] = max(state.now[0], now)


@part_of_kernel
def _end_row(
    programs: Programs, costs: Costs, state: State, rank: int, position: int, begun: float,
    now: float,
) -> float:  # fmt: skip
    """End a row whose wait or computation is over; returns when the next one begins.

    Args:
        begun: when the rank began it, if that took time; else below 0.
    """
    operation = programs.operation[programs.rows[position, KIND]]
    after = now
    if operation == WAIT:
        after += _row_s(programs, costs, state, rank, position)
    if begun >= 0 or after > now:
        if operation <= UPDATE:
            state.busy_s[rank] += now - begun
        _record(state, rank, position, begun if begun >= 0 else now, after)
    if operation == COMPUTE:
        after += _own_s(costs, state, rank, costs.after_s[rank])
    return after


@part_of_kernel
def _row_s(programs: Programs, costs: Costs, state: State, rank: int, position: int) -> float:
    """Time of the rank that a row of a message takes."""
    row = costs.message_row[programs.rows[position, KIND]]
    if row < 0 or costs.message_s.shape[1] == 0:
        return 0.0
    row_s = costs.message_s[row, _stream(programs, rank, position)]
    return _own_s(costs, state, rank, row_s * costs.share[programs.rows[position, SIZE]])


@part_of_kernel
def _own_s(costs: Costs, state: State, rank: int, time_s: float) -> float:
    """Time by which a rank runs ahead; nothing on shared cores, where it is work that it owes."""
    if costs.pool[rank] < 0:
        return time_s
    state.owed_s[rank] += time_s
    return 0.0


@part_of_kernel
def _record(state: State, rank: int, position: int, begun: float, now: float) -> None:
    if len(state.recorded):
        index = state.counter[RECORDED]
        state.recorded[index, 0] = begun
        state.recorded[index, 1] = now
        state.recorded_row[index, 0] = rank
        state.recorded_row[index, 1] = position
        state.counter[RECORDED] += 1


@part_of_kernel
def _foresee(state: State, time: float, item: int) -> None:
    """Put an event into the queue; makes room by removing alarms that are void."""
    state.counter[NUMBER] += 1
    if state.counter[QUEUED] == len(state.events.time):
        _remove_void(state)
    push(state.events, 0, state.counter[QUEUED], time, state.counter[NUMBER], item)
    state.counter[QUEUED] += 1


@part_of_kernel
def _remove_void(state: State) -> None:
    """Every rank has at most one event, and every pool of cores one that is valid."""
    ranks, events, kept = len(state.since), state.events, 0
    for index in range(state.counter[QUEUED]):
        number, item = events.number[index], events.item[index]
        if item < ranks or state.pool_alarm[item - ranks] == number:
            push(events, 0, kept, events.time[index], number, item)
            kept += 1
    state.counter[QUEUED] = kept


@part_of_kernel
def _stream(programs: Programs, rank: int, position: int) -> int:
    """The stream of a transfer that a row starts or waits for."""
    return int(programs.streams[programs.stream_base[rank] + programs.rows[position, STREAM]])


@part_of_kernel
def _transfer(programs: Programs, network: Network, stream: int, position: int) -> int:
    """Index of the transfer."""
    return int(network.first_transfer[stream]) + 1 + int(programs.rows[position, MICRO_BATCH])


@part_of_kernel
def _start(
    programs: Programs,
    costs: Costs,
    network: Network,
    state: State,
    rank: int,
    position: int,
    now: float,
) -> None:
    """Start a transfer; it moves once all of its ends have."""
    stream = _stream(programs, rank, position)
    transfer = _transfer(programs, network, stream, position)
    state.started[transfer] += 1
    if state.started[transfer] < network.starters[stream]:
        return
    size_bytes = network.size_bytes[stream] * costs.share[programs.rows[position, SIZE]]
    end = arrival(network, state.free_at, stream, size_bytes, now)
    state.over_at[transfer] = end
    last = state.waiting[transfer]
    if last >= 0:
        waiting = state.next_waiting[last]
        while waiting != last:
            _foresee(state, end, waiting)
            waiting = state.next_waiting[waiting]
        _foresee(state, end, last)


@part_of_kernel
def _is_pending(
    programs: Programs, network: Network, state: State, rank: int, position: int, now: float
) -> bool:
    """Whether a rank must wait for a transfer; it goes on when that is over."""
    transfer = _transfer(programs, network, _stream(programs, rank, position), position)
    end = state.over_at[transfer]
    if end <= now:
        return False
    if end < inf:
        _foresee(state, end, rank)
        return True
    last = state.waiting[transfer]
    state.next_waiting[rank] = rank if last < 0 else state.next_waiting[last]
    if last >= 0:
        state.next_waiting[last] = rank
    state.waiting[transfer] = rank
    return True


@part_of_kernel
def _meet(costs: Costs, state: State, rank: int, now: float) -> None:
    """All ranks go on when the last one is there, and they have agreed."""
    state.met[state.counter[MET]] = rank
    state.counter[MET] += 1
    state.now[1] = max(state.now[1], now)
    if state.counter[MET] == len(state.met):
        for index in range(len(state.met)):
            _foresee(state, state.now[1] + costs.agree_s, state.met[index])
        state.counter[MET] = 0


@part_of_kernel
def _compute(
    programs: Programs, costs: Costs, state: State, rank: int, position: int, now: float
) -> None:
    """Begin to compute; the rank goes on at the end of it."""
    kind = programs.rows[position, KIND]
    if programs.operation[kind] == UPDATE:
        work_s = costs.update_s[rank] / costs.speed[rank]
    else:
        stage = programs.stages[programs.stage_base[rank] + programs.rows[position, STAGE]]
        work_s = costs.work_s[kind, stage] / costs.speed[rank]
        work_s *= costs.share[programs.rows[position, SIZE]]
    pool = costs.pool[rank]
    if pool < 0:
        _foresee(state, now + work_s, rank)
    else:
        work_s += state.owed_s[rank]
        state.owed_s[rank] = 0.0
        begin_work(costs, state, pool, rank, work_s, now)
        _set_alarm(costs, state, pool)


@part_of_kernel
def _set_alarm(costs: Costs, state: State, pool: int) -> None:
    """Return to a pool of cores when its next work ends; voids its older alarms."""
    state.pool_alarm[pool] = state.counter[NUMBER] + 1
    if state.pool_size[pool]:
        _foresee(state, next_end(costs, state, pool), len(state.since) + pool)
    else:
        state.counter[NUMBER] += 1


@part_of_kernel
def arrival(network: Network, free_at: Floats, stream: int, size_bytes: float, now: float) -> float:
    """When a transfer that is ready now is over; takes its place in the queues of its way."""
    begun, end = now, now
    for part in range(network.way[stream], network.way[stream + 1]):
        queue = network.queue[part]
        begun = max(begun, free_at[queue])
        free_at[queue] = begun + hold_s(network, network.link[part], size_bytes)
        end = max(end, free_at[queue])
    return end + float(network.latency_s[stream])


@part_of_kernel
def hold_s(network: Network, link: int, size_bytes: float) -> float:
    """The same as :meth:`pipectl.link.Link.hold_s`, from tables."""
    first, end = network.timing[link], network.timing[link + 1]
    bandwidth = network.link_bandwidth[link]
    if first == end:
        return float(size_bytes / bandwidth)
    sizes, times = network.timing_bytes, network.timing_s
    above = first + np.searchsorted(sizes[first:end], size_bytes)
    if above == first:
        time_s = times[first]
    elif above == end:
        time_s = times[end - 1] + (size_bytes - sizes[end - 1]) / bandwidth
    else:
        rise = (times[above] - times[above - 1]) * (size_bytes - sizes[above - 1])
        time_s = times[above - 1] + rise / (sizes[above] - sizes[above - 1])
    return max(0.0, float(time_s - network.link_latency_s[link]))


@part_of_kernel
def begin_work(costs: Costs, state: State, pool: int, rank: int, work_s: float, now: float) -> None:
    """A rank begins to compute what would take ``work_s`` on a core of its own."""
    elapsed = now - state.pool_time[pool]
    state.pool_clock[pool] += elapsed * _rate(costs, state, pool)
    state.pool_time[pool] = now
    end = state.pool_clock[pool] + work_s
    push(state.work, costs.pool_base[pool], state.pool_size[pool], end, rank, rank)
    state.pool_size[pool] += 1


@part_of_kernel
def end_work(costs: Costs, state: State, pool: int, now: float) -> int:
    """The rank whose work ends now; of several the lowest."""
    base = costs.pool_base[pool]
    rank = state.work.item[base]
    state.pool_clock[pool] = state.work.time[base]
    state.pool_time[pool] = now
    drop_first(state.work, base, state.pool_size[pool])
    state.pool_size[pool] -= 1
    return int(rank)


@part_of_kernel
def next_end(costs: Costs, state: State, pool: int) -> float:
    """When the next work ends if none begins before."""
    left_s = max(0.0, float(state.work.time[costs.pool_base[pool]] - state.pool_clock[pool]))
    return float(state.pool_time[pool]) + left_s / _rate(costs, state, pool)


@part_of_kernel
def _rate(costs: Costs, state: State, pool: int) -> float:
    return min(1.0, float(costs.pool_cores[pool] / max(1, state.pool_size[pool])))


@part_of_kernel
def push(heap: Heap, base: int, size: int, time: float, number: int, item: int) -> None:
    """Add an entry to the heap of ``size`` entries that starts at index ``base``."""
    times, numbers, items = heap
    place = size
    while place > 0:
        above = (place - 1) >> 1
        at = base + above
        if times[at] < time or (times[at] == time and numbers[at] < number):
            break
        times[base + place] = times[at]
        numbers[base + place] = numbers[at]
        items[base + place] = items[at]
        place = above
    times[base + place] = time
    numbers[base + place] = number
    items[base + place] = item


@part_of_kernel
def drop_first(heap: Heap, base: int, size: int) -> None:
    """Remove the first entry, which is at ``base``, of a heap of ``size`` entries."""
    times, numbers, items = heap
    last = base + size - 1
    time, number, item = times[last], numbers[last], items[last]
    place, below = 0, 1
    while below < size - 1:
        at = base + below
        other = at + 1
        if below + 1 < size - 1 and (
            times[other] < times[at] or (times[other] == times[at] and numbers[other] < numbers[at])
        ):
            below += 1
            at += 1
        if time < times[at] or (time == times[at] and number < numbers[at]):
            break
        times[base + place] = times[at]
        numbers[base + place] = numbers[at]
        items[base + place] = items[at]
        place = below
        below = 2 * place + 1
    times[base + place] = time
    numbers[base + place] = number
    items[base + place] = item
