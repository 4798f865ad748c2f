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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Group:
    """A timeline under a name."""

    name: str
    timeline: Timeline
    plan: Plan


def chrome_trace(groups: Sequence[Group]) -> str:
    """The text of the file, an event a line, by time."""
    counts = count(1), count(1), count(1)
    entries = [entry for group in groups for entry in _Tracks(group, *counts).entries()]
    entries.sort(key=lambda entry: (entry["ph"] != "M", entry["ts"]))
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


class _Tracks:
    """One group.

    Args:
        processes, tracks, arrows: their next numbers, counted through all groups.
    """

    def __init__(
        self, group: Group, processes: count[int], tracks: count[int], arrows: count[int]
    ) -> None:
        self._group = group
        self._processes, self._tracks, self._arrow_numbers = processes, tracks, arrows
        self._channels: Sequence[Channel] = channels(group.plan)
        self._computed = Computed(group.timeline)
        self._place: dict[int, Entry] = {}
        self._by_rank: dict[int, list[Event]] = defaultdict(list)
        for event in group.timeline.events:
            self._by_rank[event.rank].append(event)
        self._over: dict[tuple[int, int], float] = {}
        for event in group.timeline.events:
            if event.kind in ("send_wait", "receive_wait"):
                message = event.channel, event.micro_batch
                self._over[message] = min(event.end_s, self._over.get(message, event.end_s))

    def entries(self) -> Iterator[Entry]:
        """Everything that the file holds of it."""
        nodes = self._group.plan.node_of_rank
        known: dict[int, int] = {}
        for rank in sorted(self._by_rank):
            if nodes[rank] not in known:
                known[nodes[rank]] = number = next(self._processes)
                name = f"{self._group.name}, node {nodes[rank]}"
                yield from _named("process", {"pid": number, "tid": 0}, name, number)
            self._place[rank] = {"pid": known[nodes[rank]], "tid": next(self._tracks)}
            yield from _named("thread", self._place[rank], f"rank {rank}", self._place[rank]["tid"])
            yield from self._messages(rank)
        for rank, events in self._by_rank.items():
            yield from (self._action(event, self._place[rank]) for event in events)
        yield from self._arrows()

    def _action(self, event: Event, place: Entry) -> Entry:
        word = _CODES.get(event.kind, event.kind.replace("_", " "))
        args: Entry = {"kind": event.kind}
        if event.stage >= 0:
            args["stage"] = event.stage
        if event.micro_batch >= 0:
            args["micro_batch"] = event.micro_batch
        category = "compute" if event.kind in COMPUTE_KINDS else "wait"
        if event.kind.endswith("_start"):
            category = "start"
        args |= self._about(event)
        return _span(word + _numbered(event), category, event.start_s, event.end_s, place, args)

    def _about(self, event: Event) -> Entry:
        """Of a message."""
        if not 0 <= event.channel < len(self._channels):
            return {}
        channel = self._channels[event.channel]
        return {
            "message": str(channel),
            "from_rank": channel.source_rank,
            "to_rank": channel.target_rank,
            "bytes": self._bytes(channel, event.micro_batch),
        }

    def _bytes(self, channel: Channel, micro_batch: int) -> int:
        """Of a message; of a split micro-batch, at most."""
        shares = self._group.plan.micro_batch_shares
        share = 1.0 if micro_batch < 0 else shares[micro_batch % len(shares)]
        return round(channel.size_bytes * share)

    def _messages(self, rank: int) -> Iterator[Entry]:
        """Tracks of what a rank sends, as many as it has messages under way at once."""
        lanes: list[tuple[float, Entry]] = []
        for event, end_s in self._sent(rank):
            free = next((i for i, lane in enumerate(lanes) if lane[0] <= event.start_s), len(lanes))
            if free == len(lanes):
                place = {**self._place[rank], "tid": next(self._tracks)}
                lanes.append((0.0, place))
                yield from _named("thread", place, f"rank {rank} sends", place["tid"])
            place = lanes[free][1]
            lanes[free] = end_s, place
            about = {"micro_batch": event.micro_batch, **self._about(event)}
            name = f"{about['message']}, m{event.micro_batch}"
            yield _span(name, "message", event.start_s, end_s, place, about)

    def _sent(self, rank: int) -> Iterator[tuple[Event, float]]:
        """What a rank sends, and when either end saw it over."""
        for event in self._by_rank[rank]:
            if event.kind == "send_start" and 0 <= event.channel < len(self._channels):
                over_s = self._over.get((event.channel, event.micro_batch), event.end_s)
                yield event, max(event.end_s, over_s)

    def _arrows(self) -> Iterator[Entry]:
        """From what made a message to what it is for."""
        outgoing: dict[tuple[int, int], list[Channel]] = defaultdict(list)
        for channel in self._channels:
            if not channel.is_local:
                outgoing[channel.source_rank, channel.source_stage].append(channel)
        for event in self._group.timeline.events:
            for channel in outgoing.get((event.rank, event.stage), ()):
                target = self._computed.target(channel, event.micro_batch)
                source = self._computed.source(channel, event.micro_batch)
                if source is event and target is not None:
                    yield from self._arrow(channel, event, target)

    def _arrow(self, channel: Channel, source: Event, target: Event) -> Iterator[Entry]:
        common = {"name": str(channel.kind), "cat": "message", "id": next(self._arrow_numbers)}
        last_ns = max(_ns(source.start_s), _ns(source.end_s) - 1)  # within the span, or it is lost
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


def _numbered(event: Event) -> str:
    stage = f" s{event.stage}" if event.stage >= 0 else ""
    return stage + (f" m{event.micro_batch}" if event.micro_batch >= 0 else "")


def _named(what: str, place: Entry, name: str, order: int) -> Iterator[Entry]:
    """The name of a process or thread, and its place among all."""
    entry = {"ph": "M", "ts": 0, **place}
    yield {"name": f"{what}_name", **entry, "args": {"name": name}}
    yield {"name": f"{what}_sort_index", **entry, "args": {"sort_index": order}}
