from dataclasses import replace

import pytest

from pipectl.cluster import Cluster, Device, Node, assumed_cluster
from pipectl.link import Link
from pipectl.planner.explain.what_if import (
    with_bandwidth,
    with_faster_links,
    with_memory,
    with_nodes,
    with_ranks,
    with_slower_links,
)
from pipectl.simulate.network import reduction_s

MEASURED = Link(1e-4, 1e9, timings=((1, 1e-4), (10**6, 1.1e-3)))


def cluster(*ranks: int) -> Cluster:
    return assumed_cluster("test", ranks, 2, 1000)


def test_the_first_nodes_are_kept_and_the_last_is_repeated():
    found = cluster(1, 2)
    assert with_nodes(found, 1).node_of_rank == (0,)
    assert with_nodes(found, 2) == found
    assert with_nodes(found, 4).node_of_rank == (0, 1, 1, 2, 2, 3, 3)
    assert len({node.name for node in with_nodes(found, 4).nodes}) == 4


@pytest.mark.parametrize(
    ("ranks", "nodes"), [(1, (0,)), (2, (0, 0)), (3, (0, 0, 1)), (4, (0, 0, 1, 1))]
)
def test_ranks_are_taken_from_the_first_nodes(ranks, nodes):
    assert with_ranks(cluster(2, 2), ranks).node_of_rank == nodes


def test_only_known_memory_grows():
    known, unknown = Device("a", memory_bytes=5), Device("b")
    mixed = replace(cluster(1, 1), nodes=(Node("x", 1, 1, known), Node("y", 1, 1, unknown)))
    found = with_memory(mixed, 10)
    assert [node.device.memory_bytes for node in found.nodes] == [15, None]


def test_a_given_bandwidth_replaces_what_was_measured_and_is_no_assumption():
    found = with_bandwidth(replace(cluster(1, 1), between_nodes=MEASURED, assumed=False), 5e8)
    assert found.between_nodes.transfer_s(5e8) == pytest.approx(1 + 1e-4)
    assert found.assumptions == ()


def test_slower_links_take_a_multiple_of_the_time_for_every_message():
    found = with_slower_links(replace(cluster(1, 1), between_nodes=MEASURED), 3.0).between_nodes
    for size in (0, 1, 1000, 10**6, 10**8):
        assert found.transfer_s(size) == pytest.approx(3 * MEASURED.transfer_s(size))
    free = with_slower_links(replace(cluster(1, 1), between_nodes=MEASURED), 0.0).between_nodes
    assert free.transfer_s(10**9) < 1e-8


def test_links_between_switches_and_measured_sums_change_with_the_others():
    far = replace(
        cluster(1, 1), between_switches=MEASURED, allreduce=((2, 1, 1e-3), (2, 10**6, 5e-3))
    )
    slower, free = with_slower_links(far, 3.0), with_slower_links(far, 0.0)
    assert slower.between_switches.transfer_s(1000) == pytest.approx(3 * MEASURED.transfer_s(1000))
    assert slower.allreduce == ((2, 1, pytest.approx(3e-3)), (2, 10**6, pytest.approx(15e-3)))
    assert free.between_switches.transfer_s(10**9) < 1e-8
    assert reduction_s(free, free.node_of_rank, (0, 1), 10**6) < 1e-8
    faster = with_faster_links(far, 2.0)
    assert faster.between_switches.transfer_s(10**6) == pytest.approx(6e-4)
    assert faster.allreduce == ((2, 1, 1e-3), (2, 10**6, pytest.approx(3e-3)))
    given = with_bandwidth(far, 5e8)
    assert given.between_switches.transfer_s(5e8) == pytest.approx(1 + 1e-4)
    assert given.allreduce == (), "sums follow from the links"


def test_faster_links_keep_their_latency():
    found = with_faster_links(replace(cluster(1, 1), between_nodes=MEASURED), 2.0).between_nodes
    assert found.transfer_s(1) == pytest.approx(1e-4)
    assert found.transfer_s(10**6) == pytest.approx(6e-4)
    assert found.transfer_s(10**6 + 10**9) == pytest.approx(6e-4 + 0.5)
