"""Simulated steps, sums and peaks by hand; for all else see the reference simulation."""

import dataclasses
import json
import random
from collections import Counter

import numpy as np
import pytest

from pipectl.errors import MismatchError, ScheduleError
from pipectl.lanes import BUCKET_BYTES, TransferKind
from pipectl.link import Link
from pipectl.plan import Prediction, StageCost, StagePeaks, Transfer
from pipectl.planner.bounds import least_step_s
from pipectl.schedule import lower
from pipectl.schedule.actions import COMPUTE_KINDS, Actions
from pipectl.schedule.registry import SCHEDULES, default_ranks
from pipectl.simulate import simulate
from pipectl.simulate.memory import copy_bytes, room_bytes
from pipectl.simulate.network import (
    SIDES,
    exchange_of,
    reduction_s,
    way_between,
    way_latency_s,
)
from pipectl.simulate.simulation import Machine
from pipectl.timeline import Timeline
from tests.planner.gate.checked_plans import cluster_of

FREE = Link(latency_s=0.0, bandwidth_bytes_per_s=1e30)
WITHIN, BETWEEN = Link(0.25, 100.0), Link(1.0, 10.0)


def cluster(ranks, within=FREE):
    return cluster_of(ranks, within=within)


def two_nodes(**changes):
    """Of two ranks each."""
    return dataclasses.replace(cluster_of(2, 2, within=WITHIN, between=BETWEEN), **changes)


def cost(forward_s, backward_s, update_s=0.0):
    return StageCost(forward_s, backward_s, update_s, 0, 0, 0)


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
    machine = cluster(plan.ranks, link)

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
    assert simulate(plan, cluster(2)).step_time_s == 8.0


def test_timeline_holds_computations_and_waits_until_all_ranks_meet(pipeline):
    plan = pipeline(2, 2, costs=[cost(1, 2, 5.0), cost(1, 2, 0.5)], node_of_rank=[0, 0, 0])
    found = simulate(plan, cluster(3))
    timeline = found.timeline
    assert [event[1:] for event in timeline.of_rank(0)] == [
        (0.0, 1.0, "forward", 0, 0, -1),
        (1.0, 2.0, "forward", 0, 1, -1),
        (2.0, 4.0, "receive_wait", 0, 0, 1),
        (4.0, 6.0, "backward", 0, 0, -1),
        (6.0, 7.0, "receive_wait", 0, 1, 1),
        (7.0, 9.0, "backward", 0, 1, -1),
        (9.0, 14.0, "update", 0, -1, -1),
    ]
    ends = [[event[1:4] for event in timeline.of_rank(rank)][-2:] for rank in (1, 2)]
    assert ends == [
        [(7.0, 9.0, "update_wait"), (9.0, 9.5, "update")],
        [(0.0, 9.0, "update_wait"), (9.0, 9.0, "update")],
    ]
    assert timeline.end_s == found.step_time_s == 14.0
    computing = (event for event in timeline.of_rank(0) if event.kind in COMPUTE_KINDS)
    busy_s = sum(event.end_s - event.start_s for event in computing)
    assert busy_s == pytest.approx(found.utilisation[0] * 14)
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


@pytest.mark.parametrize(
    ("shape", "error", "words"),
    [
        ({"warm_up": (1, 2)}, ScheduleError, r"ranks \[0, 1\] wait forever"),
        ({"node_of_rank": [0, 1]}, MismatchError, "uses 2 nodes, cluster 'c' has 1"),
    ],
)
def test_what_cannot_run_is_an_error(pipeline, shape, error, words):
    with pytest.raises(error, match=words):
        simulate(pipeline(2, 4, **shape), cluster(2))


def test_programs_may_have_fewer_micro_batches(pipeline):
    plan = pipeline(2, 8)
    programs = [lower(plan, rank, 2) for rank in range(2)]
    assert simulate(plan, cluster(2), programs).step_time_s == pytest.approx(9)


@pytest.mark.parametrize(
    ("ranks", "between", "sum_s"),
    [
        ((0, 1, 2, 3), {}, 2 * (1.0 + 4 * 100 / 10)),
        # each rank sends all three
        ((0, 1, 2, 3), {"shared": False}, 2 * (1.0 + 2 * 100 / 10 + 100 / 100)),
        # all that a node sends
        ((0, 1, 2, 3), {"shared": False, "interface": True}, 2 * (1.0 + 4 * 100 / 10)),
        ((0, 1), {}, 2 * (0.25 + 2)),
        ((1,), {}, 0.0),
    ],
)
def test_all_replicas_send_each_other_their_parts_in_two_rounds(ranks, between, sum_s):
    """Between the nodes, four messages of a part share the link in each direction."""
    machines = two_nodes(between_nodes=dataclasses.replace(BETWEEN, **between))
    assert reduction_s(machines, (0, 0, 1, 1), ranks, 400) == pytest.approx(sum_s)


def test_every_bucket_is_a_message_of_its_own():
    timings = ((1, 1.0), (2**20, 1.0), (2**21, 2.0))
    link = dataclasses.replace(BETWEEN, timings=timings, latency_s=0.5)
    for count in (1, 3):
        size = count * BUCKET_BYTES
        found = reduction_s(two_nodes(between_nodes=link), (0, 0, 1, 1), (0, 2), size)
        assert found == pytest.approx(2 * (0.5 + count * 1.5))


def test_measured_sums_count_where_as_many_ranks_are_spread_alike():
    measured = two_nodes(allreduce=((2, 100, 3.0), (2, 500, 5.0), (4, 100, 50.0)))
    nodes = (0, 0, 1, 1)
    assert reduction_s(measured, nodes, (2, 3), 300) == pytest.approx(4.0)
    assert reduction_s(measured, nodes, (1, 2), 300) == reduction_s(two_nodes(), nodes, (1, 2), 300)
    assert reduction_s(measured, nodes, (0, 1, 2, 3), 50) == pytest.approx(50.0)


def summing(pipeline, stages, sum_bytes, **link):
    """Stages of 1 s whose replicas are on two nodes, and sum so many bytes together."""
    figures = StageCost(0.0, 1.0, 0.0, sum_bytes // stages, 0, 0)
    plan = pipeline(stages, 1, costs=[figures] * stages)
    each = [(stage, stages + stage) for stage in range(stages)]
    copies = [
        dataclasses.replace(stage, ranks=ranks)
        for stage, ranks in zip(plan.stages, each, strict=True)
    ]
    nodes = (0,) * stages + (1,) * stages
    plan = dataclasses.replace(plan, stages=tuple(copies), transfers=(), node_of_rank=nodes)
    between = Link(0.0, 1e6, **link)
    return plan, cluster_of(stages, stages, within=FREE, between=between)


@pytest.mark.parametrize(
    ("link", "seconds"),
    [
        ({}, [40] * 4),
        ({"duplex": False}, [80] * 4),
        ({"shared": False}, [40, 20, 10, 5]),
        ({"shared": False, "interface": True}, [40] * 4),
    ],
)
def test_sums_of_several_stages_share_the_links_between_nodes(pipeline, link, seconds):
    """As many bytes take as long, however many stages have them; pairs of ranks have own links."""
    for stages, time_s in zip((1, 2, 4, 8), seconds, strict=True):
        found = simulate(*summing(pipeline, stages, 40_000_000, **link))
        assert found.step_time_s == pytest.approx(1.0 + time_s), stages


@pytest.mark.parametrize(
    ("measured", "step_s"),
    [
        pytest.param((), 1 + 40, id="sent over the link one after another"),
        pytest.param(((2, 20_000_000, 100.0),), 2 + 100, id="mostly the ranks' own work"),
        pytest.param(((2, 20_000_000, 5.0),), 1 + 10, id="measured to be quicker than messages"),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_sums_of_two_stages_of_a_rank_take_turns(pipeline, measured, step_s, shared):
    """Two ranks on two nodes have both stages; the second one's gradients are there at 1 s."""
    plan, machine = summing(pipeline, 2, 40_000_000, shared=shared)
    stages = tuple(dataclasses.replace(stage, ranks=(0, 1)) for stage in plan.stages)
    plan = dataclasses.replace(plan, stages=stages, node_of_rank=(0, 1))
    machine = cluster_of(1, 1, within=FREE, between=machine.between_nodes)
    machine = dataclasses.replace(machine, allreduce=measured)
    assert simulate(plan, machine).step_time_s == pytest.approx(step_s)


@pytest.mark.parametrize("seed", range(20))
def test_sums_take_at_least_their_bytes_on_every_link_and_at_most_each_after_the_other(
    pipeline, seed
):
    """Stages of 1 s with random replicas on three nodes, and bytes up to three dozen buckets."""
    draw, stages = random.Random(seed), 4
    ranks = [3 * stage + place for stage in range(stages) for place in range(3)]
    draw.shuffle(ranks)
    own = [tuple(sorted(ranks[3 * at : 3 * at + draw.randint(2, 3)])) for at in range(stages)]
    sizes = [draw.randint(1, 36 * BUCKET_BYTES) for _ in own]
    costs = [StageCost(0.0, 1.0, 0.0, size, 0, 0) for size in sizes]
    plan = pipeline(stages, 1, costs=costs)
    copies = zip(plan.stages, own, strict=True)
    plan = dataclasses.replace(
        plan,
        stages=tuple(dataclasses.replace(stage, ranks=each) for stage, each in copies),
        transfers=(),
        node_of_rank=(0,) * 4 + (1,) * 4 + (2,) * 4,
    )
    link = {name: draw.random() < 0.5 for name in ("duplex", "shared", "interface")}
    machine = cluster_of(4, 4, 4, within=WITHIN, between=Link(0.1, 1e6, **link))
    found = simulate(plan, machine)
    busy_s, alone_s = Counter(), 0.0
    for each, size in zip(own, sizes, strict=True):
        alone = exchange_of(machine, plan.node_of_rank, each, size)
        alone_s += alone.latency_s + alone.longest_s
        busy_s.update({part: s for part, s in alone.busy_s.items() if part[0] not in SIDES})
    assert found.step_time_s >= 1.0 + max(busy_s.values(), default=0.0) * (1 - 1e-9)
    assert found.step_time_s <= (1.0 + alone_s) * (1 + 1e-9)
    assert found.step_time_s >= least_step_s(plan, machine)


def test_a_message_waits_for_a_piece_of_a_sum_and_not_for_all_of_it(pipeline):
    """The second of two stages sums 16 buckets over the link that brings back its gradient."""
    figures = StageCost(0.0, 1.0, 0.0, 16 * BUCKET_BYTES, 0, 0, gradient_bytes=16 * BUCKET_BYTES)
    plan = pipeline(2, 1, costs=[figures] * 2)
    stages = [
        dataclasses.replace(stage, ranks=ranks)
        for stage, ranks in zip(plan.stages, ((0,), (1, 2)), strict=True)
    ]
    back = Transfer(TransferKind.GRADIENT, 1, 0, 1000)
    changes = {"stages": tuple(stages), "transfers": (back,), "node_of_rank": (0, 1, 2)}
    plan = dataclasses.replace(plan, **changes)
    machine = cluster_of(1, 1, 1, within=FREE, between=Link(0.0, BUCKET_BYTES, interface=True))
    found = simulate(plan, machine)
    (backward,) = (e for e in found.timeline.of_rank(0) if e.kind == "backward")
    assert 1.0 < backward.start_s <= 1.0 + 2.0
    assert found.step_time_s == pytest.approx(1.0 + 16, rel=0.01)


@pytest.mark.parametrize(("duplex", "step_s"), [(True, 20.5), (False, 21.0)])
def test_copies_to_and_from_the_host_share_a_link_that_is_not_duplex(pipeline, duplex, step_s):
    """That of micro-batch 3 to the host begins after that of 1 from there, and ends later."""
    plan = pipeline(1, 5, warm_up=(3,), costs=[StageCost(1.0, 2.0, 0.0, 0, 0, saved_bytes=250)])
    stage = dataclasses.replace(plan.stages[0], offload=True)
    link = Link(0.0, 100.0, duplex=duplex)
    machine = cluster_of(1, host_link=link)
    found = simulate(dataclasses.replace(plan, stages=(stage,)), machine)
    assert found.step_time_s == pytest.approx(step_s)


def test_links_with_equal_figures_are_two():
    nodes = [dataclasses.replace(two_nodes().nodes[0], switch=name) for name in ("a", "b")]
    apart = two_nodes(nodes=tuple(nodes), between_switches=dataclasses.replace(BETWEEN))
    assert way_latency_s(way_between(apart, (0, 1), 0, 1)) == 1.0 + 1.0
    one = two_nodes(between_nodes=dataclasses.replace(BETWEEN, interface=True))
    assert way_latency_s(way_between(one, (0, 1), 0, 1)) == 1.0


# Peaks of memory; for a ledger see test_random_plans.py

HELD = StageCost(1.0, 2.0, 0.0, parameter_bytes=100, optimizer_bytes=50, saved_bytes=10)
RESIDENT, GRADIENTS, PROCESS = 100 + 50, 100, 1000


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"peaks": StagePeaks(300, 40, 120, 60)}, GRADIENTS + 300),
        ({"peaks": StagePeaks(30, 400, 120, 60)}, GRADIENTS + 10 + 400),
        ({"peaks": StagePeaks(30, 40, 700, 60)}, 10 + 700),
        ({"peaks": StagePeaks(30, 40, 120, 600)}, GRADIENTS + 600),
        # Casts are there during the step, but no longer when parameters are updated.
        ({"peaks": StagePeaks(30, 400, 120, 60), "cast_bytes": 50}, 50 + GRADIENTS + 10 + 400),
        ({"peaks": StagePeaks(30, 40, 120, 600), "cast_bytes": 50}, GRADIENTS + 600),
        ({"gradient_bytes": 0, "buffer_bytes": 5}, 5 + 10),
        # Evaluations run between steps.
        ({"peaks": StagePeaks(300, 40, 120, 60, evaluation_bytes=90)}, GRADIENTS + 300),
        ({"peaks": StagePeaks(300, 40, 120, 60, evaluation_bytes=900), "cast_bytes": 7}, 900 + 7),
    ],
)
def test_what_an_action_allocates_for_itself_counts_while_it_runs(pipeline, changes, most):
    """Frozen parameters have no gradient, and buffers stay."""
    plan = pipeline(1, 2, costs=[dataclasses.replace(HELD, **changes)], warm_up=[1])
    found = simulate(plan, cluster(1), process_baseline_bytes=PROCESS)
    assert found.prediction.peak_memory_bytes == (PROCESS + RESIDENT + most,)


@pytest.mark.parametrize(
    ("left", "schedule", "changes", "unused"),
    [
        (0, "gpipe", {}, None),
        (1, "gpipe", {}, None),
        (200, "gpipe", {}, 4 * 200),
        (200, "1f1b", {}, 200),
        (200, "gpipe", {"recompute": True}, 200),
        (200, "gpipe", {"offload": True}, 200),
    ],
)
def test_the_heap_cannot_use_what_forwards_leave(pipeline, left, schedule, changes, unused):
    """Once for every micro-batch that waits, if this is more than the usual share (None)."""
    cost = dataclasses.replace(HELD, peaks=StagePeaks(300, 40, 120, 60, left_bytes=left))
    plan = pipeline(1, 4, schedule=schedule, costs=[cost])
    plan = dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], **changes),))
    (live,) = simulate(plan, cluster(1)).peak_memory_bytes
    (held,) = simulate(plan, cluster(1), heap_share=0.1).peak_memory_bytes
    assert held - live == pytest.approx(0.1 * (live - RESIDENT) if unused is None else unused)


@pytest.mark.parametrize(
    ("limit", "room", "copies"), [(64, 49, 40), (16, 1, 0), (10, 0, 0), (None, None, 40)]
)
def test_a_checkpoint_is_copied_if_a_rank_has_room_for_all_of_it(pipeline, limit, room, copies):
    plan = dataclasses.replace(
        pipeline(1, 4, costs=[dataclasses.replace(HELD, parameter_bytes=40, optimizer_bytes=0)]),
        prediction=Prediction(1.0, 0.0, (1.0,), (15,)),
    )
    assert room_bytes(plan, 0, limit) == room
    assert copy_bytes(plan, 0, limit) == copies
