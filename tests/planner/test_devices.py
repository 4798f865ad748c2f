"""Which devices stages may have, and how far a search goes through the ways to give them ranks."""

from dataclasses import replace
from itertools import permutations

import pytest

from pipectl.cluster import Device, Node
from pipectl.planner.costs.devices import (
    every_placement,
    exchanges,
    mixes,
    placements,
    pools,
)
from tests.planner.gate.checked_plans import cluster_of, planned
from tests.planner.gate.graphs import chain


def nodes(count):
    """Nodes of one rank each, no two equally fast."""
    return cluster_of(*[1] * count, speeds=[1.0 + rank for rank in range(count)])


def test_any_two_of_few_stages_exchange_their_ranks_and_neighbours_of_many():
    assert sorted(exchanges((0, 1, 2), nodes(3))) == [(0, 2, 1), (1, 0, 2), (2, 1, 0)]
    assert len(exchanges(tuple(range(17)), nodes(17))) == 16


def test_ranks_of_a_node_and_equal_nodes_do_not_exchange():
    assert exchanges((0, 1), cluster_of(2)) == []
    assert exchanges((0, 1), cluster_of(1, 1)) == []


def test_stages_take_ranks_from_either_end_of_nodes_that_differ_in_more_than_their_devices():
    """So the order of the nodes changes no plan."""
    for cluster, expected in (
        (cluster_of(1, 2), {(0, 1), (1, 2)}),
        (cluster_of(2, 2), {(0, 1), (0, 2)}),
    ):
        assert set(placements(cluster, pools(cluster), (0, 0))) == expected


def test_of_equally_fast_kinds_of_devices_those_with_most_memory_come_first():
    device = Device("cpu", 1.0)
    few, many, all_ = (
        Node("n", 1, 1, replace(device, memory_bytes=size)) for size in (1000, 2000, None)
    )
    for order in permutations((few, many, all_)):
        cluster = replace(cluster_of(1), nodes=order)
        assert [pool.memory_bytes for pool in pools(cluster)] == [None, 2000, 1000]


@pytest.mark.parametrize(("stages", "count"), [(2, 2), (3, 4), (12, 1)])
def test_every_placement_of_any_number_of_stages_is_listed_unless_there_are_too_many(stages, count):
    """Of three equal nodes of two ranks: 00 and 01; 001, 010, 011 and 012."""
    cluster = cluster_of(12) if stages == 12 else cluster_of(2, 2, 2)
    assert len(every_placement(cluster, stages, most=10)) == count
    assert every_placement(cluster, stages, most=count - 1) == []


@pytest.mark.parametrize("ranks", [[2, 2, 2, 2], [1] * 7], ids=["four kinds", "seven kinds"])
def test_replicas_are_planned_on_many_kinds_of_devices(ranks):
    cluster = cluster_of(*ranks, speeds=[1.0 + node / 4 for node in range(len(ranks))])
    alone_s = planned(chain(4), cluster, stages=1).predicted_step_s
    assert planned(chain(4), cluster, replicas=None).predicted_step_s < alone_s / 3


def test_kinds_of_devices_are_chosen_freely_unless_that_takes_too_long():
    few, many = nodes(2), cluster_of(8, 8, 8, speeds=(1.0, 2.0, 3.0))
    assert len(mixes(pools(few), states=100, stages=2)) == 1
    ordered = mixes(pools(many), states=4000, stages=24)
    assert [len(mix.following) for mix in ordered] == [25] * len(ordered)
