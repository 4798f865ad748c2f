"""What a measured step is said to have spent its time on, and where it differs from the plan.

What is found is in ``comparisons.txt``; ``make golden`` accepts changes.
"""

from pathlib import Path

import pytest

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.report.comparison import TIME_USES, compare, explain
from pipectl.runs import CoreShare, RankBeat
from pipectl.schedule import channels
from pipectl.simulate import simulate
from pipectl.timeline import Event, Timeline

FORWARD_0, BACKWARD_0 = Event(0, 0.0, 1.0, "forward", 0, 0), Event(0, 5.0, 7.0, "backward", 0, 0)
# The gradient is sent at 4.25 and there at 5; the activation is sent at 1 and there at 1.25.
STEP = (
    FORWARD_0,
    Event(0, 1.0, 1.0, "send_start", 0, 0, 0),
    Event(0, 1.0, 5.0, "receive_wait", 0, 0, 1),
    BACKWARD_0,
    Event(0, 7.0, 7.0, "update", -1, -1),
    Event(1, 0.0, 1.25, "receive_wait", 1, 0, 0),
    Event(1, 1.25, 2.25, "forward", 1, 0),
    Event(1, 2.25, 4.25, "backward", 1, 0),
    Event(1, 4.25, 4.25, "send_start", 1, 0, 1),
    Event(1, 4.25, 7.0, "update_wait", -1, -1),
    Event(1, 7.0, 7.0, "update", -1, -1),
)
LAST_ENDS_LATER = [e._replace(end_s=11.0) if e[0] and e.kind == "update" else e for e in STEP]

OF_PROCESSORS = {
    "a backward takes longer": [
        CoreShare(1.0),
        CoreShare(0.26, 2, 0, "processes"),
        CoreShare(0.5, 1, 1, "limit", 1.5),
    ]
}
"""Shares of their cores that ranks may have had meanwhile."""


def changed(*events):
    """The step with some events replaced, added by rank and start."""
    keys = {event[3:6] for event in events}
    return tuple(sorted([*(e for e in STEP if e[3:6] not in keys), *events]))


MEASURED = {
    "as predicted": STEP,
    "the same without starts, so a message is sent when it is made": tuple(
        event for event in STEP if event.kind != "send_start"
    ),
    "a backward takes longer": changed(BACKWARD_0._replace(end_s=8.0)),
    "Python takes time before the first action": changed(FORWARD_0._replace(start_s=0.5)),
    "a forward, or loading its data, takes longer": changed(FORWARD_0._replace(end_s=1.5)),
    "a message takes longer": changed(
        Event(0, 1.0, 7.0, "receive_wait", 0, 0, 1), BACKWARD_0._replace(start_s=7.0, end_s=9.0)
    ),
    "time passes before the backward": changed(BACKWARD_0._replace(start_s=6.0, end_s=8.0)),
    "a rank computes most of the step": changed(
        Event(1, 2.25, 6.25, "backward", 1, 0),
        Event(1, 6.25, 6.25, "send_start", 1, 0, 1),
        Event(1, 6.25, 9.0, "update_wait", -1, -1),
        Event(0, 1.0, 7.0, "receive_wait", 0, 0, 1),
        BACKWARD_0._replace(start_s=7.0, end_s=9.0),
    ),
    "a message is sent late, and the last rank is waited for before the update": (
        Event(0, 0.0, 1.0, "forward", 0, 0),
        Event(0, 1.0, 4.0, "send_wait", 0, 0, 0),
        Event(0, 4.0, 8.0, "update_wait"),
        Event(0, 8.0, 9.0, "update"),
        Event(1, 0.0, 4.0, "receive_wait", 1, 0, 0),
        Event(1, 5.0, 7.5, "forward", 1, 0),
        Event(1, 7.5, 8.0, "update_wait"),
    ),
    "a rank was not recorded, and the other did what was not planned": (
        FORWARD_0._replace(end_s=3.0),
        Event(0, 3.0, 4.0, "forward", 0, 1),
    ),
    "one by one: a rank ends its update later, and begins its next step later": tuple(
        sorted(LAST_ENDS_LATER)
    ),
    "one by one: a rank begins and ends 4 s later": tuple(
        sorted(e._replace(start_s=e[1] + 4, end_s=e[2] + 4) if e[0] else e for e in LAST_ENDS_LATER)
    ),
}
"""Events of a step by what happens; "one by one": ranks do not wait for each other to update."""


def uses(name, times):
    shown = [f"{use} {both.measured_s:g}" for use, both in times.items() if both.measured_s]
    return f"{name}: {', '.join(shown)}"


def test_what_a_step_is_said_to_have_spent_its_time_on(pipeline, snapshot):
    lines = []
    for name, events in MEASURED.items():
        measured, meets = Timeline(events, 2, 10, 1e-5), "one by one" not in name
        found = compare(Timeline(STEP, 2), measured, channels(pipeline(2, 1)), meets=meets)
        assert (found.step, found.clock_error_s) == (10, 1e-5)
        assert sum(found.difference_s.values()) == pytest.approx(found.time.more_s)
        path_s = sum(both.measured_s for both in found.critical.values())
        assert path_s == pytest.approx(found.time.measured_s)
        lines += [f"# {name}", f"time: {found.time.measured_s:g}, {found.unpaired} unpaired"]
        lines += [uses(f"rank {rank}", times) for rank, times in found.ranks.items()]
        lines += [uses("critical path", found.critical)]
        lines += [f"{label}: {text}" for label, text in explain(found)]
        if name in OF_PROCESSORS:
            beats, shares = [RankBeat(0, node="n0"), RankBeat(1, node="n1")], OF_PROCESSORS[name]
            lines += [
                f"  {label}: {text}"
                for share in shares
                for label, text in explain(found, share, beats, "slurm")
            ]
        lines += ["parts: " + ", ".join(f"{p} {p.time.measured_s:g}" for p in found.parts), ""]
    snapshot(Path(__file__).with_name("comparisons.txt"), "\n".join(lines))
    document = found.to_json()
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert set(TIME_USES) < set(document["ranks"][0])
    assert document["parts"][1]["ratio"] == 1.0


def test_shares_of_ranks_are_described_without_a_heartbeat_too():
    said = CoreShare(0.26, 3, 0, "processes").describe(())
    assert said == "3 ranks got 26% of their cores; other processes on their nodes used the rest"


def test_the_only_rank_of_a_run_is_described_as_one():
    said = CoreShare(0.5, 1, 0, "hypervisor").describe([RankBeat(0, node="n0")])
    assert said == "the rank got 50% of its cores; the hypervisor on n0 used the rest"


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_simulated_step_is_what_was_predicted(pipeline, schedule):
    plan = pipeline(3, 4, schedule=schedule, size_bytes=1000, node_of_rank=[0, 1, 2])
    nodes = tuple(Node(f"n{rank}", 1, 1, Device("cpu")) for rank in range(3))
    cluster = Cluster("c", "test", nodes, Link(0.0, 1e15), Link(0.1, 1e3))
    timeline = simulate(plan, cluster).timeline
    found = compare(timeline, timeline, channels(plan))
    assert (found.time.ratio, found.unpaired) == (1.0, 0)
    ratios = [part.time.ratio for part in found.parts if part.kind != "update"]
    assert ratios == pytest.approx([1.0] * (6 if schedule == "gpipe" else 9))
    assert sum(part.actions for part in found.parts if part.kind == "forward") == 3 * 4
    for spent in found.ranks.values():
        assert sum(both.measured_s for both in spent.values()) == pytest.approx(timeline.end_s)
        assert spent["between_actions"].measured_s == pytest.approx(0.0)
    # 2.1 s a message, and activations follow one another: no rank hides them all
    assert found.ranks[1]["communication"].predicted_s > 1.0
