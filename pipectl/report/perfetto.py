"""Timelines as a Chrome trace for ui.perfetto.dev and chrome://tracing.

A node is a process, and a rank is a track with its actions. Further tracks have the messages that
the rank sends, from their start until either end noticed their completion. Arrows lead from the
action that produced a message to the one that uses it. Each timeline has processes of its own.

Format: "Trace Event Format" (Google, 2016), its JSON object form; times in microseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from pipectl.plan import Plan
from pipectl.report.comparison import StepTimes
from pipectl.schedule import channels
from pipectl.schedule.actions import COMPUTE_KINDS
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
Track = Mapping[str, int]
"""Numbers of a process (``pid``) and a track (``tid``)."""


def chrome_trace(timelines: Mapping[str, Timeline], plan: Plan) -> str:
    """Return the text of the file: one event per line, by time.

    Args:
        timelines: timelines of the plan, by name.
    """
    entries: list[Entry] = []
    processes, tracks, arrows = count(1), count(1), count(1)
    for title, timeline in timelines.items():
        process_of_node: dict[int, int] = {}
        place_of_rank: dict[int, Track] = {}
        events_of_rank: dict[int, list[Event]] = defaultdict(list)
        over_s: dict[tuple[int, int], float] = {}  # end of messages, as first seen by either end
        for event in timeline.events:
            events_of_rank[event.rank].append(event)
            if event.kind in ("send_wait", "receive_wait"):
                message = event.channel, event.micro_batch
                over_s[message] = min(event.end_s, over_s.get(message, event.end_s))
        for rank, events in sorted(events_of_rank.items()):
            node = plan.node_of_rank[rank]
            if node not in process_of_node:
                process_of_node[node] = number = next(processes)
                entries += _named("process", {"pid": number, "tid": 0}, f"{title}, node {node}")
            place = {"pid": process_of_node[node], "tid": next(tracks)}
            place_of_rank[rank] = place
            entries += _named("thread", place, f"rank {rank}")
            free_s: dict[int, float] = {}  # by track of its messages
            for event in events:
                about = _describe_message(event, plan)
                entries.append(_action(event, about, place))
                if event.kind != "send_start" or not about:
                    continue
                track = next((tid for tid, time_s in free_s.items() if time_s <= event.start_s), 0)
                where = {**place, "tid": track or next(tracks)}
                if not track:
                    entries += _named("thread", where, f"rank {rank} sends")
                end_s = max(event.end_s, over_s.get((event.channel, event.micro_batch), 0.0))
                free_s[where["tid"]] = end_s
                text = f"{about['message']}, m{event.micro_batch}"
                args = {"micro_batch": event.micro_batch, **about}
                entries.append(_span(text, "message", event.start_s, end_s, where, args))
        entries += _arrows(timeline, plan, place_of_rank, arrows)
    entries.sort(key=lambda entry: (entry["ph"] != "M", entry["ts"]))
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _action(event: Event, about: Entry, place: Track) -> Entry:
    name, args = _CODES.get(event.kind, event.kind.replace("_", " ")), {"kind": event.kind}
    for key, letter in (("stage", "s"), ("micro_batch", "m")):
        if (number := getattr(event, key)) >= 0:
            name, args = f"{name} {letter}{number}", {**args, key: number}
    category = "start" if event.kind.endswith("_start") else "wait"
    category = "compute" if event.kind in COMPUTE_KINDS else category
    return _span(name, category, event.start_s, event.end_s, place, args | about)


def _describe_message(event: Event, plan: Plan) -> Entry:
    """Describe a message; for a split micro-batch, the bytes are an upper bound."""
    if not 0 <= event.channel < len(channels(plan)):
        return {}
    channel, shares = channels(plan)[event.channel], plan.micro_batch_shares
    share = 1.0 if event.micro_batch < 0 else shares[event.micro_batch % len(shares)]
    return {
        "message": str(channel),
        "from_rank": channel.source_rank,
        "to_rank": channel.target_rank,
        "bytes": round(channel.size_bytes * share),
    }


def _arrows(
    timeline: Timeline, plan: Plan, places: Mapping[int, Track], numbers: Iterator[int]
) -> Iterator[Entry]:
    """Yield arrows from the action that produced a message to the one that uses it."""
    reading = StepTimes(timeline, channels(plan))
    micro_batches = sorted({event.micro_batch for event in timeline.events})
    for channel in channels(plan):
        for micro_batch in micro_batches if not channel.is_local else ():
            source, target = reading.ends(channel, micro_batch)
            if source is None or target is None:
                continue
            common = {"name": str(channel.kind), "cat": "message", "id": next(numbers)}
            # within the span, or it is lost
            last_ns = max(_ns(source.start_s), _ns(source.end_s) - 1)
            yield {**common, "ph": "s", "ts": last_ns / 1e3, **places[source.rank]}
            start = _ns(target.start_s) / 1e3
            yield {**common, "ph": "f", "bp": "e", "ts": start, **places[target.rank]}


def _span(
    name: str, category: str, start_s: float, end_s: float, place: Track, args: Entry
) -> Entry:
    """Return a span in whole nanoseconds, so that adjacent spans do not overlap."""
    start = _ns(start_s)
    times = {"ts": start / 1e3, "dur": (_ns(end_s) - start) / 1e3}
    return {"name": name, "cat": category, "ph": "X", **times, **place, "args": args}


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _named(what: str, place: Track, name: str) -> Iterator[Entry]:
    """Yield the name and the position of a process or thread."""
    for key, value in (("name", name), ("sort_index", place["tid"] or place["pid"])):
        yield {"name": f"{what}_{key}", "ph": "M", "ts": 0, **place, "args": {key: value}}
