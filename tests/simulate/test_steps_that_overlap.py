"""The time between updates where steps overlap."""

from dataclasses import replace
from itertools import pairwise

import pytest
from random_plans import apart

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.plan import StageCost
from pipectl.simulate import simulate

COST = StageCost(1.0, 2.0, 0.5, 100, 50, 10)
SLOW = replace(COST, forward_s=3.0)
UNEQUAL = [
    StageCost(forward_s, backward_s, 0.0, 100, 0, 20)
    for forward_s, backward_s in [(0.25, 0.5), (0.5, 1.5), (0.75, 1.25)]
]


def cluster(ranks, latency_s=0.0, bandwidth_bytes_per_s=1e12):
    link = Link(latency_s, bandwidth_bytes_per_s)
    return Cluster("c", "test", (Node("n", ranks, ranks, Device("cpu", 1.0)),), link, link)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "costs", "latency_s", "step_s"),
    [
        *[("pipedream", 1, [COST] * stages, 0.0, 3.5) for stages in (1, 2, 4)],
        *[("pipedream-2bw", 4, [COST] * stages, 0.0, 12.5) for stages in (1, 2, 4)],
        ("pipedream", 1, [COST, SLOW, COST], 0.0, 5.5),
        # The first few steps wait longer where messages are slow: 3.08 s a step.
        ("pipedream", 1, UNEQUAL, 1.0, 3.0),
    ],
)
def test_the_slowest_stage_sets_the_pace_and_never_waits(
    pipeline, schedule, micro_batches, costs, latency_s, step_s
):
    plan = pipeline(len(costs), micro_batches, schedule=schedule, costs=costs)
    found = simulate(plan, cluster(len(costs), latency_s))
    assert found.step_time_s == pytest.approx(step_s)
    busy = [micro_batches * (c.forward_s + c.backward_s) + c.update_s for c in costs]
    assert found.utilisation == pytest.approx([busy_s / step_s for busy_s in busy])


def test_rounding_leaves_no_bubble_below_none(pipeline):
    cost = StageCost(0.1, 0.2, 0.1, 0, 0, 0)
    plan = pipeline(2, 2, schedule="pipedream-2bw", costs=[cost] * 2)
    assert simulate(plan, cluster(2)).bubble == 0


def test_smaller_last_micro_batches_count_in_every_step(pipeline):
    plan = pipeline(1, 2, schedule="pipedream-2bw", costs=[COST], micro_batch_size=4, batch_size=6)
    assert simulate(plan, cluster(1)).step_time_s == pytest.approx(1.5 * 3 + 0.5)


@pytest.mark.parametrize(("weights_s", "step_s"), [(0.0, 1.0), (0.3, 1.0), (0.9, 1.0), (1.5, 1.5)])
def test_weights_travel_during_a_forward_or_set_the_pace(pipeline, weights_s, step_s):
    """Every version is a message of its own."""
    cost = StageCost(1.0, 1.0, 0.0, round(1000 * weights_s), 0, 0)
    plan = apart(pipeline(2, 1, schedule="pipedream", costs=[cost] * 2), (True, True))
    found = simulate(plan, cluster(4, 0.0, 1000))
    assert found.step_time_s == pytest.approx(step_s)
    computed = [e for e in found.timeline.events if e.kind in ("forward", "backward")]
    assert len(computed) > 20
    assert all(event.end_s - event.start_s == pytest.approx(1.0) for event in computed)


def test_the_timeline_fills_runs_and_drains(pipeline):
    plan = pipeline(2, 1, schedule="pipedream", costs=[COST] * 2)
    timeline = simulate(plan, cluster(2)).timeline
    updates = [event for event in timeline.of_rank(0) if event.kind == "update"]
    assert [event.micro_batch for event in updates] == list(range(len(updates)))
    assert len(updates) > 5
    gaps = {round(last.end_s - first.end_s, 6) for first, last in pairwise(updates[1:5])}
    assert gaps == {3.5}
