"""Sums over replicas, copies to the host, and ways through switches, by hand."""

import dataclasses

import pytest

from pipectl.cluster import Cluster, Device, Node
from pipectl.graph import BUCKET_BYTES
from pipectl.link import Link
from pipectl.plan import StageCost
from pipectl.schedule.actions import Action, Actions, Kind
from pipectl.simulate import simulate, simulation
from pipectl.simulate.network import reduction_s

WITHIN, BETWEEN = Link(0.25, 100.0), Link(1.0, 10.0)


def cluster(nodes=2, ranks=2, *, host_link=None, **changes):
    switches = changes.pop("switches", [None] * nodes)
    device = Device("gpu", host_link=host_link)
    found = Cluster(
        "c",
        "test",
        tuple(Node(f"n{i}", ranks, ranks, device, switches[i]) for i in range(nodes)),
        WITHIN,
        BETWEEN,
    )
    return dataclasses.replace(found, **changes)


def replicated(pipeline, ranks, node_of_rank, size_bytes=400):
    """One stage of several replicas."""
    cost = StageCost(1.0, 2.0, 0.0, size_bytes, 0, 20)
    plan = pipeline(1, len(ranks), costs=[cost], ranks=[0], node_of_rank=node_of_rank)
    stage = dataclasses.replace(plan.stages[0], ranks=tuple(ranks))
    return dataclasses.replace(plan, stages=(stage,))


def program(*rows):
    return Actions.of([*rows, Action(Kind.UPDATE, 0)])


def summing(*before, between=()):
    start, wait = Action(Kind.REDUCE_START, 0), Action(Kind.REDUCE_WAIT, 0)
    return program(*before, start, *between, wait)


def test_all_replicas_send_each_other_their_parts_in_two_rounds():
    """Between the nodes, four messages of a part share the link in each direction."""
    found = reduction_s(cluster(), (0, 0, 1, 1), (0, 1, 2, 3), 400)
    assert found == pytest.approx(2 * (1.0 + 4 * 100 / 10))
    own = cluster(between_nodes=dataclasses.replace(BETWEEN, shared=False))
    found = reduction_s(own, (0, 0, 1, 1), (0, 1, 2, 3), 400)
    assert found == pytest.approx(2 * (1.0 + 2 * 100 / 10 + 100 / 100))  # each rank sends all three
    both = cluster(between_nodes=dataclasses.replace(BETWEEN, shared=False, interface=True))
    found = reduction_s(both, (0, 0, 1, 1), (0, 1, 2, 3), 400)
    assert found == pytest.approx(2 * (1.0 + 4 * 100 / 10)), "all that a node sends"
    assert reduction_s(cluster(), (0, 0, 1, 1), (0, 1), 400) == pytest.approx(2 * (0.25 + 2))
    assert reduction_s(cluster(), (0, 0, 1, 1), (1,), 400) == 0


def test_every_bucket_is_a_message_of_its_own():
    timings = ((1, 1.0), (2**20, 1.0), (2**21, 2.0))
    link = dataclasses.replace(BETWEEN, timings=timings, latency_s=0.5)
    found = [
        reduction_s(cluster(between_nodes=link), (0, 0, 1, 1), (0, 2), size)
        for size in (BUCKET_BYTES, 3 * BUCKET_BYTES)
    ]
    assert found == [pytest.approx(2 * (0.5 + count * 1.5)) for count in (1, 3)]


def test_what_is_summed_are_gradients_of_what_is_trained(pipeline):
    """Not all parameters, of which some are frozen."""
    plan = replicated(pipeline, (0, 1), [0, 0])
    cost = dataclasses.replace(plan.stages[0].cost, gradient_bytes=100)
    frozen = dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], cost=cost),))
    ends = [simulate(item, cluster()).step_time_s for item in (plan, frozen)]
    sums = [reduction_s(cluster(), (0, 0), (0, 1), size) for size in (400, 100)]
    assert ends[0] - ends[1] == pytest.approx(sums[0] - sums[1])


def test_measured_sums_count_where_as_many_ranks_are_spread_alike():
    measured = cluster(allreduce=((2, 100, 3.0), (2, 500, 5.0), (4, 100, 50.0)))
    nodes = (0, 0, 1, 1)
    assert reduction_s(measured, nodes, (2, 3), 300) == pytest.approx(4.0)
    assert reduction_s(measured, nodes, (1, 2), 300) == reduction_s(cluster(), nodes, (1, 2), 300)
    assert reduction_s(measured, nodes, (0, 1, 2, 3), 50) == pytest.approx(50.0)


def test_a_sum_begins_with_the_last_replica_and_runs_beside_computations(pipeline):
    plan = replicated(pipeline, (0, 1), [0, 0])
    forward = Action(Kind.FORWARD, 0, 0)
    programs = [
        summing(forward, between=[Action(Kind.BACKWARD, 0, 0)]),
        summing(forward, forward),
    ]
    found = simulate(plan, cluster(1), programs)
    sum_s = 2 * (0.25 + 200 / 100)
    assert found.step_time_s == pytest.approx(2 + sum_s)
    waits = [event for event in found.timeline.events if event.kind == "reduce_wait"]
    assert [(event.rank, event.start_s, event.end_s) for event in waits] == [
        (0, 3.0, 2 + sum_s),
        (1, 2.0, 2 + sum_s),
    ]


def copies(kind):
    return [Action(kind, 0, index) for index in range(2)]


@pytest.mark.parametrize(
    ("duplex", "end"),
    [(True, 2 * 4 + 0.5), (False, 4 * 4 + 0.5)],
)
def test_copies_follow_one_another_in_each_direction(pipeline, duplex, end):
    plan = pipeline(1, 2, costs=[StageCost(1.0, 1.0, 0.0, 0, 0, 20)])
    stage = dataclasses.replace(plan.stages[0], offload=True)
    plan = dataclasses.replace(plan, stages=(stage,))
    kinds = Kind.OFFLOAD_START, Kind.FETCH_START, Kind.OFFLOAD_WAIT, Kind.FETCH_WAIT
    rows = [row for kind in kinds for row in copies(kind)]
    host = cluster(1, 1, host_link=Link(0.5, 5.0, duplex=duplex))
    assert simulate(plan, host, [program(*rows)]).step_time_s == pytest.approx(end)


def messages(pipeline, ends, shape, nodes=range(4), size=100):
    """Messages of one size that are all ready at 0; when the last has arrived."""
    stages = 1 + max(map(max, ends))
    free = StageCost(0.0, 0.0, 0.0, 0, 0, 0)
    plan = pipeline(
        stages, 1, costs=[free] * stages, node_of_rank=nodes[:stages], size_bytes=size,
        skips=[(a, (b,), False) for a, b in ends],
    )  # fmt: skip
    moves = tuple(t for t in plan.transfers if (t.source, t.target) in ends)
    moves = tuple(dict.fromkeys(moves))
    return simulate(dataclasses.replace(plan, transfers=moves), shape).step_time_s


def test_nodes_of_different_switches_share_the_way_between_these(pipeline):
    ends, switches = [(0, 2), (1, 3)], ["a", "a", "b", "b"]
    between = Link(2.0, 5.0)
    apart = cluster(4, 1, switches=switches, between_switches=between)
    assert messages(pipeline, ends, apart) == pytest.approx(2 + 1 + 2 * 20)
    own = dataclasses.replace(between, shared=False)
    found = messages(pipeline, ends, dataclasses.replace(apart, between_switches=own))
    assert found == pytest.approx(2 + 1 + 20)
    together = dataclasses.replace(apart, nodes=cluster(4, 1).nodes)
    assert messages(pipeline, ends, together) == pytest.approx(1 + 10)


def test_links_with_equal_figures_are_two(pipeline):
    apart = cluster(4, 1, switches=["a", "a", "b", "b"], between_switches=Link(1.0, 10.0))
    assert messages(pipeline, [(0, 2)], apart) == pytest.approx(1 + 1 + 10)
    one = dataclasses.replace(BETWEEN, interface=True)
    assert messages(pipeline, [(0, 1)], cluster(2, 1, between_nodes=one)) == pytest.approx(1 + 10)


def test_returning_to_python_between_events_changes_nothing(random_case, monkeypatch):
    plan, shape = random_case(300)
    expected = simulate(plan, shape)
    monkeypatch.setattr(simulation, "EVENTS_AT_ONCE", 1)
    assert simulate(plan, shape) == expected


def test_a_message_enters_a_node_only_when_it_has_begun_to_leave_its_own(pipeline):
    """The second leaves behind the first, and the third enters behind the second."""
    shape = cluster(4, 1, between_nodes=dataclasses.replace(BETWEEN, interface=True))
    assert messages(pipeline, [(0, 2), (0, 3), (1, 3)], shape) == pytest.approx(1 + 30)
