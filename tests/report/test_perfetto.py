"""The form that ui.perfetto.dev and chrome://tracing ask for."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

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


@pytest.fixture
def plan(pipeline):
    return pipeline(2, 2, node_of_rank=[0, 1], size_bytes=4000)


@pytest.fixture
def entries(plan):
    timelines = {"predicted": step(), "measured": step(1e-7 / 3)}
    document = json.loads(chrome_trace(timelines, plan))
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    return document["traceEvents"]


REQUIRED = {
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "ph", "id", "bp", "ts", "pid", "tid"},
}


def spans(entries):
    """By track, in order."""
    found = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "X":
            found[entry["pid"], entry["tid"]].append(entry)
    return found


def names(entries, what):
    return {
        (entry["pid"], entry["tid"]): entry["args"]["name"]
        for entry in entries
        if entry["name"] == what
    }


def test_every_event_has_the_fields_of_its_phase(entries):
    for entry in entries:
        assert set(entry) == REQUIRED[entry["ph"]]
        assert isinstance(entry["pid"], int)
        assert isinstance(entry["tid"], int)
        assert entry["ts"] >= 0
        assert entry.get("dur", 0) >= 0
    phases = [entry["ph"] for entry in entries]
    assert set(phases[: phases.count("M")]) == {"M"}
    times = [entry["ts"] for entry in entries if entry["ph"] != "M"]
    assert times == sorted(times)


def test_a_node_is_a_process_and_a_rank_a_track(entries):
    assert list(names(entries, "process_name").values()) == [
        *("predicted, node 0", "predicted, node 1"),
        *("measured, node 0", "measured, node 1"),
    ]
    threads = names(entries, "thread_name")
    assert len({tid for _, tid in threads}) == len(threads)
    of_one = [name for (pid, _), name in threads.items() if pid == 3]
    assert of_one == ["rank 0", "rank 0 sends", "rank 0 sends"]
    assert set(spans(entries)) == set(threads)
    assert {pid for pid, _ in threads} == {pid for pid, _ in names(entries, "process_name")}


def test_times_are_microseconds_and_nothing_overlaps_on_a_track(entries):
    tracks = spans(entries)
    for track in tracks.values():
        for one, other in pairwise(track):
            assert round((one["ts"] + one["dur"]) * 1e3) <= round(other["ts"] * 1e3)
    first = tracks[1, 1]
    assert [(e["name"], e["ts"], e["dur"]) for e in first[:3]] == [
        ("F s0 m0", 0.0, 1000.0),
        ("send start s0 m0", 1000.0, 100.0),
        ("F s0 m1", 1100.0, 1000.0),
    ]
    assert [e["name"] for e in first[-2:]] == ["B s0 m0", "U"]
    assert [e["cat"] for e in first[:6]] == [*["compute", "start"] * 2, "wait", "wait"]


def test_messages_say_what_they_are_and_last_until_either_end_saw_them_over(entries):
    sent = [entry for entry in entries if entry["ph"] == "X" and entry["cat"] == "message"]
    first, second, back = (entry for entry in sent if entry["pid"] <= 2)
    assert first["args"] == {
        "micro_batch": 0,
        "message": "activation of stage 0 for stage 1",
        "from_rank": 0,
        "to_rank": 1,
        "bytes": 4000,
    }
    assert (first["ts"], first["dur"]) == (1000.0, 1500.0)
    assert (second["ts"], second["dur"]) == (2100.0, 3500.0)
    assert first["tid"] != second["tid"]
    assert back["name"] == "gradient of stage 1 for stage 0, m0"


def test_arrows_lead_from_what_made_a_message_to_what_it_is_for(entries):
    arrows = defaultdict(dict)
    for entry in entries:
        if entry["ph"] in "sf":
            arrows[entry["id"]][entry["ph"]] = entry
    assert len(arrows) == 4
    tracks = spans(entries)
    for ends in arrows.values():
        assert set(ends) == {"s", "f"}
        for entry in ends.values():
            track = tracks[entry["pid"], entry["tid"]]
            inside = [e for e in track if e["ts"] <= entry["ts"] < e["ts"] + e["dur"]]
            assert [e["cat"] for e in inside] == ["compute"]
    start, end = arrows[1]["s"], arrows[1]["f"]
    assert (start["ts"], end["ts"], end["bp"]) == (999.999, 2500.0, "e")


def test_the_last_micro_batch_may_be_smaller(pipeline):
    plan = pipeline(2, 2, size_bytes=4000, micro_batch_size=4, batch_size=6)
    entries = json.loads(chrome_trace({"measured": step()}, plan))["traceEvents"]
    sent = [e["args"]["bytes"] for e in entries if e.get("cat") == "message" and e["ph"] == "X"]
    assert sent == [4000, 2000, 4000]
    assert {entry["pid"] for entry in entries} == {1}  # both ranks on one node
