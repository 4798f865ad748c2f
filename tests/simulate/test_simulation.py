"""Simulated steps against closed forms and published figures."""

import dataclasses
import json
import random

import numpy as np
import pytest

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import MismatchError, ScheduleError
from pipectl.graph import TransferKind
from pipectl.link import Link
from pipectl.plan import StageCost, Transfer
from pipectl.planner.bounds import least_step_s
from pipectl.schedule import lower
from pipectl.schedule.actions import COMPUTE_KINDS, Actions
from pipectl.schedule.registry import SCHEDULES, default_ranks
from pipectl.simulate import simulate
from pipectl.simulate.simulation import Machine
from pipectl.timeline import Timeline

FREE = Link(latency_s=0.0, bandwidth_bytes_per_s=1e30)


def cluster(*nodes, within=FREE, between=FREE):
    """Nodes given as (ranks, cores) or (ranks, cores, device speed)."""
    return Cluster(
        name="c",
        source="test",
        nodes=tuple(
            Node(f"n{index}", ranks, cores, Device("cpu", *speed))
            for index, (ranks, cores, *speed) in enumerate(nodes)
        ),
        within_node=within,
        between_nodes=between,
    )


def cost(forward_s, backward_s, update_s=0.0):
    return StageCost(forward_s, backward_s, update_s, 0, 0, 0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (3, 1), (5, 2), (6, 11)])
def test_bubble_of_equal_stages_is_the_closed_form(pipeline, schedule, stages, micro_batches):
    found = simulate(pipeline(stages, micro_batches, schedule=schedule), cluster((stages, stages)))
    assert found.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert found.step_time_s == pytest.approx(3 * (micro_batches + stages - 1))
    assert found.utilisation == pytest.approx([1 - found.bubble] * stages)


def test_all_ranks_meet_before_they_update(pipeline):
    plan = pipeline(2, 1, costs=[cost(1, 2, 5.0), cost(1, 2, 0.5)], node_of_rank=[0, 0, 0])
    found = simulate(plan, cluster((3, 3)))
    updates = [event for event in found.timeline.events if event.kind == "update"]
    waits = {event.rank: event for event in found.timeline.events if event.kind == "update_wait"}
    assert [(event.rank, event.start_s, event.end_s) for event in updates] == [
        (0, 6.0, 11.0),
        (1, 6.0, 6.5),
        (2, 6.0, 6.0),
    ]
    assert (waits[1].start_s, waits[1].end_s) == (4.0, 6.0)
    assert (waits[2].start_s, waits[2].end_s) == (0.0, 6.0)
    assert found.step_time_s == 11.0


@pytest.mark.parametrize("link", [FREE, Link(1e-4, 1e30), Link(2e-3, 1e30)])
@pytest.mark.parametrize("micro_batches", [3, 6])
@pytest.mark.parametrize("schedule", [each.name for each in SCHEDULES.values() if each.flushes])
def test_the_next_step_begins_while_others_end_theirs(pipeline, schedule, micro_batches, link):
    """The step time is that of steps in a row."""
    draw, stages = random.Random(micro_batches), 6
    ranks = default_ranks(schedule, stages)
    costs = [
        dataclasses.replace(
            cost(draw.uniform(1e-3, 2e-3), draw.uniform(2e-3, 4e-3), draw.uniform(0, 5e-3)),
            weight_s=1.5e-3,
        )
        for _ in range(stages)
    ]
    together = pipeline(stages, micro_batches, schedule=schedule, ranks=ranks, costs=costs)
    plan = dataclasses.replace(together, updates_together=False)
    machine = cluster((plan.ranks, plan.ranks), within=link)

    def run_s(steps):
        programs = []
        for rank in range(plan.ranks):
            step = lower(plan, rank)
            rows = [step.shifted(index * micro_batches).rows for index in range(steps)]
            programs.append(Actions(np.concatenate(rows)))
        return Machine(plan, machine, programs, steps=steps).run()

    step_s = simulate(plan, machine).step_time_s
    assert (run_s(16) - run_s(8)) / 8 == pytest.approx(step_s)
    assert step_s <= simulate(together, machine).step_time_s
    assert 0 < least_step_s(plan, machine) <= step_s


def test_no_rank_begins_a_long_step_before_all_backwards_have_ended(pipeline):
    """The second rank ends its backward at 9, when the first has ended its update."""
    first, second = dataclasses.replace(cost(1, 2), weight_s=0.0), cost(1, 6)
    second = dataclasses.replace(second, weight_s=5.0)
    plan = pipeline(2, 1, schedule="zb-h1", costs=[first, second])
    plan = dataclasses.replace(plan, updates_together=False)
    assert simulate(plan, cluster((2, 2))).step_time_s == 8.0


def test_shared_cores_are_shared_evenly(pipeline):
    """Work of 1 and 3 on one core: the short one ends at 2, the long one at 4."""
    plan = pipeline(2, 1, costs=[cost(1, 0), cost(3, 0)])
    plan = dataclasses.replace(plan, transfers=())
    events = simulate(plan, cluster((2, 1))).timeline.events
    ends = [event.end_s for event in events if event.kind == "forward"]
    assert ends == pytest.approx([2, 4])


def two_streams(pipeline, streams, node_of_rank, size=10):
    """Stages that each send some bytes after a second of work, to stages that do nothing."""
    senders = {source for source, _ in streams}
    costs = [cost(float(stage in senders), 0) for stage in range(4)]
    plan = pipeline(4, 1, costs=costs, node_of_rank=node_of_rank)
    sends = tuple(
        Transfer(TransferKind.ACTIVATION, source, target, size) for source, target in streams
    )
    return dataclasses.replace(plan, transfers=sends)


def test_messages_between_two_nodes_follow_one_another(pipeline):
    slow = Link(latency_s=0.5, bandwidth_bytes_per_s=5.0)
    shared = simulate(
        two_streams(pipeline, [(0, 2), (1, 3)], [0, 0, 1, 1]), cluster((2, 2), (2, 2), between=slow)
    )
    apart = simulate(
        two_streams(pipeline, [(0, 2), (1, 3)], [0, 1, 2, 2]),
        cluster((1, 1), (1, 1), (2, 2), between=slow),
    )
    assert apart.step_time_s == pytest.approx(1 + 2 + 0.5)
    assert shared.step_time_s == pytest.approx(1 + 2 + 2 + 0.5)


def test_timeline_holds_computations_and_waits(pipeline):
    found = simulate(pipeline(2, 2), cluster((2, 2)))
    timeline = found.timeline
    assert [event[1:] for event in timeline.of_rank(0)] == [
        (0.0, 1.0, "forward", 0, 0, -1),
        (1.0, 2.0, "forward", 0, 1, -1),
        (2.0, 4.0, "receive_wait", 0, 0, 1),
        (4.0, 6.0, "backward", 0, 0, -1),
        (6.0, 7.0, "receive_wait", 0, 1, 1),
        (7.0, 9.0, "backward", 0, 1, -1),
        (9.0, 9.0, "update", 0, -1, -1),
    ]
    assert timeline.end_s == found.step_time_s
    computing = (event for event in timeline.of_rank(0) if event.kind in COMPUTE_KINDS)
    busy_s = sum(event.end_s - event.start_s for event in computing)
    assert busy_s == pytest.approx(found.utilisation[0] * 9)
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


def test_prediction_is_what_a_plan_records(pipeline):
    plan = pipeline(2, 2)
    found = simulate(plan, cluster((2, 2)), process_baseline_bytes=100)
    assert found.prediction.peak_memory_bytes == (100, 100)
    with_prediction = dataclasses.replace(plan, prediction=found.prediction)
    assert (
        type(plan).from_json(json.loads(json.dumps(with_prediction.to_json()))) == with_prediction
    )


def test_programs_that_deadlock_are_an_error(pipeline):
    plan = pipeline(2, 4, warm_up=(1, 2))
    with pytest.raises(ScheduleError, match=r"ranks \[0, 1\] wait forever"):
        simulate(plan, cluster((2, 2)))


def test_programs_may_have_fewer_micro_batches(pipeline):
    plan = pipeline(2, 8)
    programs = [lower(plan, rank, 2) for rank in range(2)]
    assert simulate(plan, cluster((2, 2)), programs).step_time_s == pytest.approx(9)


def test_a_cluster_with_too_few_nodes_is_an_error(pipeline):
    plan = pipeline(2, 2, node_of_rank=[0, 1])
    with pytest.raises(MismatchError, match="uses 2 nodes, cluster 'c' has 1"):
        simulate(plan, cluster((2, 2)))
