"""Row times from the recorded steps of a measurement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from pipectl.link import RowTimes
from pipectl.schedule.actions import COMPUTE_KINDS, EVENT_NAMES
from pipectl.schedule.channel import Channel
from pipectl.timeline import Event, Timeline

_MESSAGES = ("send_start", "send_wait", "receive_start", "receive_wait")
_MARGIN_S = 100e-6
"""A message has arrived if it was sent at least this long ago."""
_LEAST = 5
"""Messages that arrived before their receiver waited, at least; else the fastest tenth counts."""


class Steps(NamedTuple):
    """Steps of one plan.

    Args:
        channels: of the plan.
        recorded: timelines of the steps.
        time_s: seconds of each recorded step, on rank 0.
        update_s: predicted seconds of the optimizer on rank 0.
    """

    channels: Sequence[Channel]
    recorded: Sequence[Timeline]
    time_s: Sequence[float]
    update_s: float = 0.0


def row_times_of(measured: Sequence[Steps]) -> RowTimes:
    """Return the medians over all steps, by message size.

    The time between a computation and the next row contains MPI's work on messages in flight. Its
    excess over the time with the smallest messages counts as receiving.
    """
    rows: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in _MESSAGES}
    after: dict[int, list[float]] = defaultdict(list)
    waits: dict[int, list[float]] = defaultdict(list)
    begin, end, agree = [], [], []
    for steps in measured:
        for timeline, time_s in zip(steps.recorded, steps.time_s, strict=True):
            largest = max((channel.size_bytes for channel in steps.channels), default=0)
            ranks = _by_rank(timeline)
            after[largest] += [
                later.start_s - event.end_s
                for events in ranks.values()
                for event, later in pairwise(events)
                if event.kind in COMPUTE_KINDS and event.kind != "update"
            ]
            for name, size, spent_s in _messages(timeline, steps.channels, waits):
                rows[name][size].append(spent_s)
            begin.append(min((events[0].start_s for events in ranks.values()), default=0.0))
            if events := ranks.get(0):  # the update, and what follows it within the step
                update_s = sum(e.end_s - e.start_s for e in events if e.kind == "update")
                rest_s = time_s - begin[-1] - (events[-1].end_s - events[0].start_s)
                end.append(update_s + rest_s - steps.update_s)
            else:
                end.append(-steps.update_s)
            meetings = (e.end_s - e.start_s for e in timeline.events if e.kind == EVENT_NAMES[-1])
            agree.append(min(meetings, default=0.0))  # the last rank to arrive waits for no other
    for size, waited in waits.items():
        if len(rows["receive_wait"][size]) < _LEAST:
            rows["receive_wait"][size] = sorted(waited)[: 1 + len(waited) // 10]
    between = {size: median(times) for size, times in after.items() if times}
    compute_s = min(between.values(), default=0.0)
    by_size = {
        name: {size: median(times) for size, times in sorted(table.items()) if times}
        for name, table in rows.items()
    }
    for size in by_size["receive_wait"]:
        by_size["receive_wait"][size] += max(0.0, between.get(size, compute_s) - compute_s)
    return RowTimes(
        **{name: tuple(table.items()) for name, table in by_size.items()},
        compute=compute_s,
        begin=median(begin or [0.0]),
        end=max(0.0, median(end or [0.0])),
        agree=median(agree or [0.0]),
    )


def _by_rank(timeline: Timeline) -> dict[int, list[Event]]:
    """Return the events of each rank in order, without ranks that have none."""
    ranks: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(timeline.events, key=lambda event: event.start_s):
        ranks[event.rank].append(event)
    return ranks


def _messages(
    timeline: Timeline, channels: Sequence[Channel], waits: Mapping[int, list[float]]
) -> Iterator[tuple[str, int, float]]:
    """Yield name, bytes and seconds of each row of a message that did not wait for the other rank.

    Args:
        waits: collects the seconds of all ``receive_wait``, by bytes.
    """
    sent = {
        (event.channel, event.micro_batch): event.end_s
        for event in timeline.events
        if event.kind == "send_start"
    }
    for event in timeline.events:
        if event.kind not in _MESSAGES or not 0 <= event.channel < len(channels):
            continue
        size, spent_s = channels[event.channel].size_bytes, event.end_s - event.start_s
        if event.kind == "receive_wait":
            waits[size].append(spent_s)
            sent_s = sent.get((event.channel, event.micro_batch))
            if sent_s is None or sent_s + _MARGIN_S > event.start_s:
                continue
        yield event.kind, size, spent_s
