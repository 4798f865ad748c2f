"""The time between updates where steps overlap."""

from dataclasses import replace
from itertools import pairwise

import pytest

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.plan import StageCost
from pipectl.schedule import default_warm_up
from pipectl.simulate import simulate

COST = StageCost(1.0, 2.0, 0.5, 100, 50, 10)


def cluster(ranks, latency_s=0.0, bandwidth_bytes_per_s=1e12):
    link = Link(latency_s, bandwidth_bytes_per_s)
    return Cluster("c", "test", (Node("n", ranks, ranks, Device("cpu", 1.0)),), link, link)


def halves_apart(pipeline, weights_s):
    """Two stages of two ranks each, whose weights travel that long; their equal times, a cluster.

    Saved values and activations take no time.
    """
    cost = StageCost(1.0, 1.0, 0.0, round(1000 * weights_s), 0, 0)
    plan = pipeline(2, 1, schedule="pipedream", costs=[cost] * 2, node_of_rank=[0] * 4)
    stages = (
        replace(stage, ranks=(2 * index,), backward_ranks=(2 * index + 1,))
        for index, stage in enumerate(plan.stages)
    )
    warm_up = default_warm_up("pipedream", 2, 1, apart=(True, True))
    return replace(plan, stages=tuple(stages), warm_up=warm_up), cluster(4, 0.0, 1000)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(("schedule", "micro_batches"), [("pipedream", 1), ("pipedream-2bw", 4)])
def test_equal_stages_never_wait(pipeline, schedule, micro_batches, stages):
    plan = pipeline(stages, micro_batches, schedule=schedule, costs=[COST] * stages)
    found = simulate(plan, cluster(stages))
    assert found.step_time_s == pytest.approx(3 * micro_batches + 0.5)
    assert found.bubble == pytest.approx(0, abs=1e-9)


def test_rounding_leaves_no_bubble_below_none(pipeline):
    cost = StageCost(0.1, 0.2, 0.1, 0, 0, 0)
    plan = pipeline(2, 2, schedule="pipedream-2bw", costs=[cost] * 2)
    assert simulate(plan, cluster(2)).bubble == 0


def test_the_slowest_stage_sets_the_pace(pipeline):
    slow = replace(COST, forward_s=3.0)
    plan = pipeline(3, 1, schedule="pipedream", costs=[COST, slow, COST])
    found = simulate(plan, cluster(3))
    assert found.step_time_s == pytest.approx(5.5)
    assert found.utilisation == pytest.approx((3.5 / 5.5, 1.0, 3.5 / 5.5))


def test_steps_count_from_when_all_stages_wait_as_long_as_ever(pipeline):
    """The first few wait longer where messages are slow: 3.08 s a step."""
    times = [(0.25, 0.5), (0.5, 1.5), (0.75, 1.25)]
    costs = [StageCost(forward_s, backward_s, 0.0, 100, 0, 20) for forward_s, backward_s in times]
    plan = pipeline(3, 1, schedule="pipedream", costs=costs)
    assert simulate(plan, cluster(3, latency_s=1.0)).step_time_s == pytest.approx(3.0)


def test_a_flushed_step_is_longer_by_its_start_and_end(pipeline):
    plans = [pipeline(4, 4, schedule=name, costs=[COST] * 4) for name in ("1f1b", "pipedream-2bw")]
    flushed, overlapped = (simulate(plan, cluster(4)).step_time_s for plan in plans)
    assert flushed - overlapped == pytest.approx(3 * 3)


def test_smaller_last_micro_batches_count_in_every_step(pipeline):
    plan = pipeline(1, 2, schedule="pipedream-2bw", costs=[COST], micro_batch_size=4, batch_size=6)
    assert simulate(plan, cluster(1)).step_time_s == pytest.approx(1.5 * 3 + 0.5)


@pytest.mark.parametrize("weights_s", [0.0, 0.3, 0.9])
def test_weights_travel_during_a_forward(pipeline, weights_s):
    found = simulate(*halves_apart(pipeline, weights_s))
    assert found.step_time_s == pytest.approx(1.0)


def test_weights_that_travel_longer_than_a_forward_set_the_pace(pipeline):
    assert simulate(*halves_apart(pipeline, 1.5)).step_time_s == pytest.approx(1.5)


def test_every_version_of_the_weights_is_a_message_of_its_own(pipeline):
    timeline = simulate(*halves_apart(pipeline, 0.9)).timeline
    assert len(timeline.events) > 20
    for event in timeline.events:
        if event.kind in ("forward", "backward"):
            assert event.end_s - event.start_s == pytest.approx(1.0)


def test_the_timeline_fills_runs_and_drains(pipeline):
    plan = pipeline(2, 1, schedule="pipedream", costs=[COST] * 2)
    timeline = simulate(plan, cluster(2)).timeline
    updates = [event for event in timeline.of_rank(0) if event.kind == "update"]
    assert [event.micro_batch for event in updates] == list(range(len(updates)))
    assert len(updates) > 5
    gaps = {round(last.end_s - first.end_s, 6) for first, last in pairwise(updates[1:5])}
    assert gaps == {3.5}
