"""Clusters with other nodes, memory and links, and until which number of nodes a job scales."""

from dataclasses import replace

import pytest

from pipectl.cluster import Device, Node, assumed_cluster
from pipectl.errors import InfeasibleError
from pipectl.link import Link
from pipectl.plan import Prediction
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.explain.scaling import scaling
from pipectl.simulate.network import reduction_s
from tests.planner.gate.graphs import chain

MEASURED = Link(1e-4, 1e9, timings=((1, 1e-4), (10**6, 1.1e-3)))
FAR = replace(
    assumed_cluster("test", [1, 1], 2, 1000),
    assumed=False,
    between_nodes=MEASURED,
    between_switches=MEASURED,
    allreduce=((2, 1, 1e-3), (2, 10**6, 5e-3)),
)


def scaled(times_s, nodes=None, progress=lambda _: None):
    """By a planner that takes given times by number of nodes, and fits on no other number."""

    def planner(profile, cluster, request):
        nodes = len(cluster.nodes)
        if nodes not in times_s:
            raise InfeasibleError(f"{nodes} are too few")
        plan = make_plan(profile, cluster, request)
        return replace(plan, prediction=Prediction(times_s[nodes], 0.25, (), ()))

    request, one = PlanRequest(name="test", batch_size=64), assumed_cluster("test", [1], 1, None)
    return scaling(chain(4), one, request, nodes or list(times_s), planner, progress)


def test_every_count_is_planned_once_in_rising_order():
    asked = []
    found = scaled({1: 7.2, 2: 3.6, 4: 1.8}, [4, 1, 2, 2], asked.append)
    assert asked == [1, 2, 4] == [count.ranks for count in found.counts]
    speeds = [count.samples_per_s for count in found.counts]
    assert speeds == pytest.approx([64 / 7.2, 64 / 3.6, 64 / 1.8])
    assert [found.efficiency(count) for count in found.counts] == [1.0, 1.0, 1.0]
    assert [count.node_hours for count in found.counts] == pytest.approx([2.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("times_s", "pays"),
    [
        ({1: 8.0, 2: 5.0, 4: 2.5}, 4),  # 60 and 100 percent of the possible gain
        ({1: 8.0, 2: 5.33, 4: 5.0}, 2),  # 50 and 7 percent
        ({1: 8.0, 2: 6.0, 4: 1.0}, 1),  # 33 percent first: what comes later does not count
        ({1: 8.0, 2: 9.0}, 1),
        ({1: 8.0, 3: 4.0}, 3),  # 50 percent: three nodes could be three times as fast
        ({1: 8.0, 3: 4.1}, 1),
    ],
)
def test_scaling_pays_while_nodes_give_half_of_what_they_could(times_s, pays):
    assert scaled(times_s).pays_until.nodes == pays


def test_efficiency_is_against_the_fewest_nodes_that_fit():
    found = scaled({2: 4.0, 4: 2.5}, [1, 2, 4])
    assert (found.counts[0].plan, found.counts[0].reason) == (None, "1 are too few")
    assert [found.efficiency(count) for count in found.counts] == [None, 1.0, 0.8]
    assert found.base is found.counts[1]
    nowhere = scaled({}, [1, 2])
    assert (nowhere.base, nowhere.pays_until) == (None, None)
    idle = scaled({1: 0.0, 2: 0.0})
    assert [idle.efficiency(count) for count in idle.counts] == [None, None]


def test_the_first_nodes_and_ranks_are_kept_the_last_node_is_repeated_and_known_memory_grows():
    found = assumed_cluster("test", [1, 2], 2, 1000)
    assert found.with_nodes(1).node_of_rank == (0,)
    assert found.with_nodes(2) == found
    assert found.with_nodes(4).node_of_rank == (0, 1, 1, 2, 2, 3, 3)
    assert len({node.name for node in found.with_nodes(4).nodes}) == 4
    pairs = assumed_cluster("test", [2, 2], 2, 1000)
    for ranks, nodes in ((1, (0,)), (2, (0, 0)), (3, (0, 0, 1)), (4, (0, 0, 1, 1))):
        assert pairs.with_ranks(ranks).node_of_rank == nodes
    known, unknown = Device("a", memory_bytes=5), Device("b")
    mixed = replace(found, nodes=(Node("x", 1, 1, known), Node("y", 1, 1, unknown)))
    grown = mixed.with_more_memory(10)
    assert [node.device.memory_bytes for node in grown.nodes] == [15, None]


def both(cluster):
    """The links between nodes and between switches."""
    return cluster.between_nodes, cluster.between_switches


def test_links_have_the_given_bandwidth_or_are_slower_or_faster_for_messages_and_sums():
    given, slower, free, faster = (
        FAR.with_bandwidth(5e8),
        FAR.with_slower_links(3.0),
        FAR.with_slower_links(0.0),
        FAR.with_faster_links(2.0),
    )
    for size in (0, 1, 1000, 10**6, 10**8):
        expected = pytest.approx([3 * MEASURED.transfer_s(size)] * 2)
        assert [link.transfer_s(size) for link in both(slower)] == expected
    for size, faster_s in ((1, 1e-4), (10**6, 6e-4), (10**6 + 10**9, 6e-4 + 0.5)):
        assert [link.transfer_s(size) for link in both(faster)] == pytest.approx([faster_s] * 2)
    assert [link.transfer_s(5e8) for link in both(given)] == pytest.approx([1 + 1e-4] * 2)
    assert max(link.transfer_s(10**9) for link in both(free)) < 1e-8
    assert slower.allreduce == ((2, 1, pytest.approx(3e-3)), (2, 10**6, pytest.approx(15e-3)))
    assert faster.allreduce == ((2, 1, 1e-3), (2, 10**6, pytest.approx(3e-3)))
    assert (given.allreduce, given.assumptions) == ((), ()), "what is given is no assumption"
    assert reduction_s(free, free.node_of_rank, (0, 1), 10**6) < 1e-8
