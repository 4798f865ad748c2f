"""The form that ui.perfetto.dev and chrome://tracing ask for."""

import json
from pathlib import Path

from pipectl.report.perfetto import chrome_trace
from pipectl.timeline import Event, Timeline


def step(late_s=0.0):
    """One micro-batch of two stages, its messages, and two messages under way at once."""
    return Timeline(
        (
            Event(0, 0.0, 0.001, "forward", 0, 0),
            Event(0, 0.001, 0.0011, "send_start", 0, 0, 0),
            Event(0, 0.0011, 0.0021, "forward", 0, 1),
            Event(0, 0.0021, 0.0022, "send_start", 0, 1, 0),
            Event(0, 0.0022, 0.003, "send_wait", 0, 0, 0),
            Event(0, 0.003, 0.006 + late_s, "receive_wait", 0, 0, 1),
            Event(0, 0.006 + late_s, 0.0081, "backward", 0, 0),
            Event(0, 0.0081, 0.0082, "update"),
            Event(1, 0.0, 0.0025, "receive_wait", 1, 0, 0),
            Event(1, 0.0025, 0.0035, "forward", 1, 0),
            Event(1, 0.0035, 0.0055, "backward", 1, 0),
            Event(1, 0.0055, 0.0055, "send_start", 1, 0, 1),
            Event(1, 0.0055, 0.0056, "receive_wait", 1, 1, 0),
        ),
        2,
        10,
    )


def test_two_timelines_as_a_trace(pipeline, snapshot):
    """Two nodes are processes, ranks and messages under way are tracks on which nothing overlaps,
    and arrows lead from the action that made a message to the one that it is for. The last
    micro-batch is smaller, and so is its message.

    ``trace.json`` opens in ui.perfetto.dev.
    """
    sizes = {"size_bytes": 4000, "micro_batch_size": 4, "batch_size": 6}
    plan = pipeline(2, 2, node_of_rank=[0, 1], **sizes)
    text = chrome_trace({"predicted": step(), "measured": step(1e-7 / 3)}, plan)
    lines = json.dumps(json.loads(text)).replace('}, {"name"', '},\n{"name"') + "\n"
    snapshot(Path(__file__).with_name("trace.json"), lines)
    times = [entry["ts"] for entry in json.loads(text)["traceEvents"] if entry["ph"] != "M"]
    assert times == sorted(times)
