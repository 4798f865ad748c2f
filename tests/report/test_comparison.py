import pytest

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.report.comparison import (
    OTHERS,
    SPENT,
    Both,
    Part,
    compare,
    explain,
)
from pipectl.schedule import channels
from pipectl.simulate import simulate
from pipectl.timeline import Event, Timeline

FREE = Link(0.0, 1e15)
FORWARD_0, BACKWARD_0 = Event(0, 0.0, 1.0, "forward", 0, 0), Event(0, 5.0, 7.0, "backward", 0, 0)
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


def test_a_wait_is_for_others_until_the_message_is_sent(pipeline):
    found = compare(Timeline(STEP, 2), Timeline(STEP, 2), channels(pipeline(2, 1)))
    spent = [{name: s.measured_s for name, s in each.items()} for each in found.ranks.values()]
    rest = {"sums": 0.0, "offload": 0.0, "between_actions": 0.0}
    # sent at 4.25 and there at 5; sent at 1 and there at 1.25
    assert spent == [
        {"computing": 3.0, "waiting_for_others": 3.25, "communication": 0.75, **rest},
        {"computing": 3.0, "waiting_for_others": 3.75, "communication": 0.25, **rest},
    ]
    # Without starts, a message is sent when it is made.
    plain = Timeline(tuple(event for event in STEP if event.kind != "send_start"), 2)
    assert compare(plain, plain, channels(pipeline(2, 1))).ranks == found.ranks


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_simulated_step_is_what_was_predicted(pipeline, schedule):
    plan = pipeline(3, 4, schedule=schedule, size_bytes=1000, node_of_rank=[0, 1, 2])
    nodes = tuple(Node(f"n{rank}", 1, 1, Device("cpu")) for rank in range(3))
    timeline = simulate(plan, Cluster("c", "test", nodes, FREE, Link(0.1, 1e3))).timeline
    found = compare(timeline, timeline, channels(plan))
    assert found.time.ratio == 1.0
    assert found.unpaired == 0
    assert [part.time.ratio for part in found.parts if part.kind != "update"] == pytest.approx(
        [1.0] * (6 if schedule == "gpipe" else 9)
    )
    assert sum(part.actions for part in found.parts if part.kind == "forward") == 3 * 4
    for spent in found.ranks.values():
        assert sum(both.measured_s for both in spent.values()) == pytest.approx(timeline.end_s)
        assert spent["between_actions"].measured_s == pytest.approx(0.0)
    # 2.1 s a message, and activations follow one another: no rank hides them all
    assert found.ranks[1]["communication"].predicted_s > 1.0
    words = "no part of any rank's step is 2% of the step longer than predicted, or more"
    assert dict(explain(found))["difference"] == words


def changed(*events):
    """The step with some events replaced, added by rank and start."""
    keys = {event[3:6] for event in events}
    return Timeline(tuple(sorted([*(e for e in STEP if e[3:6] not in keys), *events])), 2, 10, 1e-5)


@pytest.mark.parametrize(
    ("measured", "words", "advice"),
    [
        (
            changed(BACKWARD_0._replace(end_s=8.0)),
            "backward of stage 0 on rank 0: 1.00 s longer than predicted (1.50 times)",
            "the nodes are more or less busy",
        ),
        (
            changed(FORWARD_0._replace(start_s=0.5)),
            "time between actions (Python) on rank 0: 500 ms longer than predicted",
            None,
        ),
        (
            changed(FORWARD_0._replace(end_s=1.5)),
            "forward of stage 0 on rank 0: 500 ms longer than predicted (1.50 times); loading "
            "the data counts as forward",
            None,
        ),
        (
            changed(
                Event(0, 1.0, 7.0, "receive_wait", 0, 0, 1),
                BACKWARD_0._replace(start_s=7.0, end_s=9.0),
            ),
            "waiting for messages on rank 0: 2.00 s longer than predicted (3.67 times)",
            "fewer stages send less; `pipectl profile --links`",
        ),
        (
            changed(BACKWARD_0._replace(start_s=6.0, end_s=8.0)),
            "time between actions (Python) on rank 0: 1.00 s longer than predicted",
            "larger micro-batches",
        ),
    ],
)
def test_what_is_off_is_named(pipeline, measured, words, advice):
    """There is advice if the whole step takes longer."""
    found = compare(Timeline(STEP, 2), measured, channels(pipeline(2, 1)))
    assert dict(explain(found))["difference"] == words
    assert sum(found.difference_s.values()) == pytest.approx(found.time.more_s)
    given = dict(explain(found)).get("advice")
    assert given is advice or given.startswith(advice)
    assert (found.step, found.clock_error_s) == (10, 1e-5)


def test_what_limits_the_speed_is_what_takes_the_time(pipeline):
    """A rank that computes most of the step, else what else takes the time of that rank."""
    slow = changed(
        Event(1, 2.25, 6.25, "backward", 1, 0),
        Event(1, 6.25, 6.25, "send_start", 1, 0, 1),
        Event(1, 6.25, 9.0, "update_wait", -1, -1),
        Event(0, 1.0, 7.0, "receive_wait", 0, 0, 1),
        BACKWARD_0._replace(start_s=7.0, end_s=9.0),
    )
    fuller = ("would help", SPENT[OTHERS].advice)
    assert explain(compare(Timeline(STEP, 2), slow, channels(pipeline(2, 1))))[:3] == [
        (
            "bottleneck",
            "rank 1 computes for 5.00 s of 9.00 s, longest in backward of stage 1; the other for "
            "3.00 s; filling and draining the pipeline adds 3.00 s",
        ),
        fuller,
        (
            "ranks spend",
            "50% waiting for other ranks, 44% computing, 6% waiting for messages",
        ),
    ]
    even = compare(Timeline(STEP, 2), Timeline(STEP, 2), channels(pipeline(2, 1)))
    # Each rank computes 3 s; what the other one adds on the critical path is not hidden.
    assert {name: both.measured_s for name, both in even.critical.items()} == {
        **dict.fromkeys(SPENT, 0.0), "computing": 6.0, "communication": 1.0
    }  # fmt: skip
    assert explain(even)[:2] == [
        (
            "bottleneck",
            "computing, on all ranks alike: rank 0 computes for 3.00 s of 7.00 s, longest in "
            "backward of stage 0; filling and draining the pipeline adds 3.00 s",
        ),
        fuller,
    ]


def test_the_critical_path_has_no_waits_for_others_and_is_as_long_as_the_step(pipeline):
    """A rank waits before the update for the last one, and for messages that are sent late."""
    slow = (
        Event(0, 0.0, 1.0, "forward", 0, 0),
        Event(0, 1.0, 4.0, "send_wait", 0, 0, 0),
        Event(0, 4.0, 8.0, "update_wait"),
        Event(0, 8.0, 9.0, "update"),
        Event(1, 0.0, 4.0, "receive_wait", 1, 0, 0),
        Event(1, 5.0, 7.5, "forward", 1, 0),
        Event(1, 7.5, 8.0, "update_wait"),
    )
    found = compare(Timeline(slow, 2), Timeline(slow, 2), channels(pipeline(2, 1)))
    times = {name: both.measured_s for name, both in found.critical.items()}
    assert {name: time_s for name, time_s in times.items() if time_s} == {
        "computing": 1.0 + 2.5 + 1.0, "communication": 3.0 + 0.5, "between_actions": 1.0
    }  # fmt: skip
    words = "waiting for messages, 3.50 s; rank 1 computes for "
    assert dict(explain(found))["bottleneck"].startswith(words)


def test_actions_are_paired_by_rank_kind_stage_and_micro_batch(pipeline):
    slower = FORWARD_0._replace(end_s=3.0)
    other = Event(0, 3.0, 4.0, "forward", 0, 1)
    measured = Timeline((slower, other), 2, 3)
    found = compare(Timeline(STEP, 2), measured, channels(pipeline(2, 1)))
    assert found.parts == (Part(0, 0, "forward", 1, Both(1.0, 3.0)),)
    assert found.unpaired == 3  # backward and update of rank 0; the second forward
    document = found.to_json()
    assert document["parts"][0]["ratio"] == 3.0
    assert [rank["rank"] for rank in document["ranks"]] == [0]
    assert set(SPENT) < set(document["ranks"][0])


def test_a_rank_begins_its_next_step_while_another_ends_its_own(pipeline):
    """The second rank waits for 1 s and ends 4 s after the first: after 10 s all begin again."""
    last = [e._replace(end_s=11.0) if e.kind == "update" and e.rank == 1 else e for e in STEP]
    measured = Timeline(tuple(sorted(last)), 2)
    found = compare(Timeline(STEP, 2), measured, channels(pipeline(2, 1)), meets=False)
    assert (found.time.predicted_s, found.time.measured_s) == (7.0, 10.0)
    for spent in found.ranks.values():
        assert sum(both.measured_s for both in spent.values()) == pytest.approx(10.0)
    assert sum(both.measured_s for both in found.critical.values()) == pytest.approx(10.0)
    late = [e._replace(start_s=e.start_s + 4, end_s=e.end_s + 4) if e.rank else e for e in last]
    found = compare(Timeline(STEP, 2), Timeline(tuple(sorted(late)), 2), (), meets=False)
    assert found.ranks[1]["between_actions"].measured_s == 0.0
