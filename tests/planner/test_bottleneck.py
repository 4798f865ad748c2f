"""What limits a plan, by hand: time of the busiest rank, and the link that works longest."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipectl.cluster import Device, Node
from pipectl.link import Link
from pipectl.plan import Replication, StageCost
from pipectl.planner.explain.bottleneck import busiest_link, step_parts
from pipectl.simulate import simulate
from tests.planner.gate.checked_plans import cluster_of, planned
from tests.planner.gate.graphs import chain

COST = StageCost(1.0, 2.0, 0.5, 0, 0, 0)


def cluster(*ranks, bandwidth=1e9, **link):
    return cluster_of(*ranks, within=Link(0.0, bandwidth, **link))


def parts(plan, machines):
    return step_parts(plan, machines, simulate(plan, machines))


def test_a_step_is_work_messages_and_what_these_leave_idle(pipeline):
    alone = parts(pipeline(1, 4, costs=[COST]), cluster(1))
    assert (alone.compute_s, alone.update_s, alone.step_s) == pytest.approx((12.0, 0.5, 12.5))
    assert (alone.communication_s, alone.bubble_s) == pytest.approx((0.0, 0.0))
    free = parts(pipeline(2, 4, node_of_rank=(0, 1)), cluster(1, 1))
    assert (free.rank, free.stages) == (0, (0,))
    assert (free.step_s, free.compute_s, free.bubble_s) == pytest.approx((15.0, 12.0, 3.0))
    slow = pipeline(2, 1, size_bytes=7, node_of_rank=(0, 1))
    found = parts(slow, cluster(1, 1, bandwidth=1.0))
    assert (found.communication_s, found.bubble_s) == pytest.approx((14.0, 3.0))


@given(
    times=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    micro_batches=st.integers(1, 6),
    size_bytes=st.integers(0, 10),
)
def test_the_parts_add_up_to_the_step(pipeline, times, micro_batches, size_bytes):
    costs = [replace(COST, forward_s=float(time_s)) for time_s in times]
    stages = len(costs)
    given = {"costs": costs, "size_bytes": size_bytes, "node_of_rank": range(stages)}
    plan = pipeline(stages, micro_batches, **given)
    found = parts(plan, cluster(*[1] * stages, bandwidth=2.0))
    each = (found.busy_s, found.reduction_s, found.offload_s, found.communication_s)
    assert sum(each) + found.bubble_s == pytest.approx(found.step_s)
    assert min(*each, found.bubble_s) >= 0


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "pipedream-2bw"])
def test_of_steps_that_overlap_one_counts_and_idle_ones_have_no_parts(schedule):
    machines = cluster(1, 1)
    plan = planned(chain(8), machines, 32, schedule=schedule)
    found = parts(plan, machines)
    assert found.busy_s == pytest.approx(max(plan.prediction.utilisation) * found.step_s)
    assert found.busy_s + found.communication_s + found.bubble_s == pytest.approx(found.step_s)
    idle = replace(chain(8, forward_s=0.0, backward_s=0.0), optimizer=None)
    assert parts(planned(idle, machines, 32, schedule=schedule), machines).busy_s == 0


def busiest(plan, machines):
    found = busiest_link(plan, machines)
    return found and (found.between, found.source, found.target, found.bytes_per_step)


def only(plan, *lanes):
    """The plan with messages of these lanes alone."""
    kept = (t for t in plan.transfers if (t.source, t.target) in lanes)
    return replace(plan, transfers=tuple(kept))


def test_links_are_those_of_ranks_or_of_their_nodes_and_may_carry_both_directions(pipeline):
    assert busiest(pipeline(1, 4), cluster(1)) is None
    given = {"size_bytes": 1000, "node_of_rank": (0, 0, 1, 1)}
    skips = [(0, (2,), True), (1, (3,), True)]
    crossed = only(pipeline(4, 8, skips=skips, **given), (0, 2), (1, 3))
    assert busiest(crossed, cluster(2, 2, shared=True)) == ("node", 0, 1, 16_000)
    assert busiest(crossed, cluster(2, 2, shared=False)) == ("rank", 0, 2, 8000)
    assert busiest_link(crossed, cluster(2, 2)).busy_s == pytest.approx(16e-6)
    pair = pipeline(2, 8, size_bytes=1000, node_of_rank=(0, 1))
    assert busiest(pair, cluster(1, 1, duplex=False))[3] == 16_000
    fan = pipeline(3, 8, size_bytes=1000, skips=[(0, (1, 2), True)], node_of_rank=(0, 1, 2))
    fan = only(fan, (0, 1), (0, 2))
    sent = sum(8 * item.size_bytes for item in fan.transfers)
    assert busiest(fan, cluster(1, 1, 1, interface=True)) == ("node", 0, None, sent)
    nodes = tuple(Node(name, 1, 1, Device("cpu"), switch=name) for name in "ab")
    far = replace(cluster(1, 1), nodes=nodes, between_switches=Link(0.0, 1e6))
    assert busiest(pair, far) == ("switch", "a", "b", 8000)
    assert busiest_link(pair, far).busy_s == pytest.approx(8e-3)


def test_replicas_send_their_parts_and_saved_values_and_weights_are_messages(pipeline):
    given = {"size_bytes": 1000, "node_of_rank": (0, 0, 1, 1), "micro_batch_size": 2}
    plan = pipeline(2, 8, **given)

    def held(first, second, way):
        stages = (replace(plan.stages[0], ranks=first), replace(plan.stages[1], ranks=second))
        return replace(plan, stages=stages, replication=way)

    behind, split = (
        held((0, 2), (1, 3), Replication.WHOLE),
        held((0, 1), (2, 3), Replication.SPLIT),
    )
    assert busiest(behind, cluster(2, 2)) == ("rank", 0, 1, 4000)
    assert busiest(split, cluster(2, 2)) == ("node", 0, 1, 8000)
    cost = replace(COST, saved_bytes=50_000, parameter_bytes=300)
    alone = pipeline(1, 8, costs=[cost], ranks=[0], node_of_rank=(0, 1))
    stage = replace(alone.stages[0], backward_ranks=(1,))
    found = busiest(replace(alone, stages=(stage,)), cluster(1, 1))
    assert found == ("node", 0, 1, 8 * stage.kept_bytes)
