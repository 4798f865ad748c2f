"""Timelines as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

A node is a process and a rank a track of it, with what the rank does one after the other; further
tracks hold the messages it sends, from their start until either end saw that they were over, and
arrows lead from what made a message to what it is for. Several timelines, such as the predicted and
the measured one, stand below each other as processes of their own.

Format: "Trace Event Format" (Google, 2016), its JSON object form; times in microseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from pipectl.plan import Plan
from pipectl.report.comparison import Computed
from pipectl.schedule import Channel, channels
from pipectl.simulate import COMPUTE_KINDS
from pipectl.timeline import Event, Timeline

_CODES = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "recompute": "R",
    "evaluate": "E",
    "update": "U",
    "update_wait": "wait for all",
}
Entry = dict[str, Any]


def chrome_trace(timelines: Mapping[str, Timeline], plan: Plan) -> str:
    """The text of the file, one event per line, by time.

    Args:
        timelines: of the plan, by name.
    """
    numbers = count(1), count(1), count(1)
    entries = [
        entry
        for name, timeline in timelines.items()
        for entry in _Tracks(timeline, plan, *numbers).entries(name)
    ]
    entries.sort(key=lambda entry: (entry["ph"] != "M", entry["ts"]))
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


class _Tracks:
    """Those of one timeline.

    Args:
        processes, tracks, arrows: their next numbers, counted through all timelines.
    """

    def __init__(
        self,
        timeline: Timeline,
        plan: Plan,
        processes: count[int],
        tracks: count[int],
        arrows: count[int],
    ) -> None:
        self._timeline, self._plan = timeline, plan
        self._processes, self._tracks, self._arrow_numbers = processes, tracks, arrows
        self._channels = channels(plan)
        self._place: dict[int, Entry] = {}
        self._by_rank: dict[int, list[Event]] = defaultdict(list)
        self._over: dict[tuple[int, int], float] = {}
        for event in timeline.events:
            self._by_rank[event.rank].append(event)
            if event.kind in ("send_wait", "receive_wait"):
                message = event.channel, event.micro_batch
                self._over[message] = min(event.end_s, self._over.get(message, event.end_s))

    def entries(self, name: str) -> Iterator[Entry]:
        """Everything that the file holds of the timeline."""
        processes: dict[int, int] = {}
        for rank in sorted(self._by_rank):
            node = self._plan.node_of_rank[rank]
            if node not in processes:
                processes[node] = number = next(self._processes)
                place = {"pid": number, "tid": 0}
                yield from _named("process", place, f"{name}, node {node}", number)
            self._place[rank] = {"pid": processes[node], "tid": next(self._tracks)}
            yield from _named("thread", self._place[rank], f"rank {rank}", self._place[rank]["tid"])
            yield from self._messages(rank)
        for rank, events in self._by_rank.items():
            yield from (self._action(event, self._place[rank]) for event in events)
        yield from self._arrows()

    def _action(self, event: Event, place: Entry) -> Entry:
        name = _CODES.get(event.kind, event.kind.replace("_", " "))
        args: Entry = {"kind": event.kind}
        for key, letter, number in (
            ("stage", "s", event.stage), ("micro_batch", "m", event.micro_batch)
        ):  # fmt: skip
            if number >= 0:
                name += f" {letter}{number}"
                args[key] = number
        category = "compute" if event.kind in COMPUTE_KINDS else "wait"
        if event.kind.endswith("_start"):
            category = "start"
        args |= self._about(event)
        return _span(name, category, event.start_s, event.end_s, place, args)

    def _about(self, event: Event) -> Entry:
        """Of a message; of a split micro-batch, the bytes are at most so many."""
        if not 0 <= event.channel < len(self._channels):
            return {}
        channel, shares = self._channels[event.channel], self._plan.micro_batch_shares
        share = 1.0 if event.micro_batch < 0 else shares[event.micro_batch % len(shares)]
        return {
            "message": str(channel),
            "from_rank": channel.source_rank,
            "to_rank": channel.target_rank,
            "bytes": round(channel.size_bytes * share),
        }

    def _messages(self, rank: int) -> Iterator[Entry]:
        """Tracks of what a rank sends, as many as it has messages under way at once."""
        lanes: list[tuple[float, Entry]] = []
        for event in self._by_rank[rank]:
            about = self._about(event)
            if event.kind != "send_start" or not about:
                continue
            end_s = max(event.end_s, self._over.get((event.channel, event.micro_batch), 0.0))
            free = next((i for i, lane in enumerate(lanes) if lane[0] <= event.start_s), len(lanes))
            if free == len(lanes):
                place = {**self._place[rank], "tid": next(self._tracks)}
                lanes.append((0.0, place))
                yield from _named("thread", place, f"rank {rank} sends", place["tid"])
            place = lanes[free][1]
            lanes[free] = end_s, place
            name = f"{about['message']}, m{event.micro_batch}"
            args = {"micro_batch": event.micro_batch, **about}
            yield _span(name, "message", event.start_s, end_s, place, args)

    def _arrows(self) -> Iterator[Entry]:
        """From what made a message to what it is for."""
        computed = Computed(self._timeline)
        outgoing: dict[tuple[int, int], list[Channel]] = defaultdict(list)
        for channel in self._channels:
            if not channel.is_local:
                outgoing[channel.source_rank, channel.source_stage].append(channel)
        for source in self._timeline.events:
            for channel in outgoing.get((source.rank, source.stage), ()):
                target = computed.target(channel, source.micro_batch)
                if target is None or computed.source(channel, source.micro_batch) is not source:
                    continue
                number = next(self._arrow_numbers)
                common = {"name": str(channel.kind), "cat": "message", "id": number}
                # within the span, or it is lost
                last_ns = max(_ns(source.start_s), _ns(source.end_s) - 1)
                yield {**common, "ph": "s", "ts": last_ns / 1e3, **self._place[source.rank]}
                start = _ns(target.start_s) / 1e3
                yield {**common, "ph": "f", "bp": "e", "ts": start, **self._place[target.rank]}


def _span(
    name: str, category: str, start_s: float, end_s: float, place: Entry, args: Entry
) -> Entry:
    """Whole nanoseconds, so that neighbours that touch do not overlap."""
    start = _ns(start_s)
    times = {"ts": start / 1e3, "dur": (_ns(end_s) - start) / 1e3}
    return {"name": name, "cat": category, "ph": "X", **times, **place, "args": args}


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _named(what: str, place: Entry, name: str, order: int) -> Iterator[Entry]:
    """The name of a process or thread, and its place among all."""
    entry = {"ph": "M", "ts": 0, **place}
    yield {"name": f"{what}_name", **entry, "args": {"name": name}}
    yield {"name": f"{what}_sort_index", **entry, "args": {"sort_index": order}}
