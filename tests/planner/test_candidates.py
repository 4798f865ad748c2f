"""All partitions of small graphs, candidates in order, and what is near a layout."""

from hypothesis import given, settings
from hypothesis import strategies as st
from pipectl.planner.partition.moves import EVERY, FAR, FEW, neighbours

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.planner import PlanRequest
from pipectl.planner.candidates import Candidates
from pipectl.planner.graph.blocks import condense
from pipectl.planner.graph.downsets import Enumeration, all_downsets
from pipectl.planner.partition.layout import Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import open_orders

LINK = Link(1e-4, 1e7)
CLUSTER = Cluster("c", "test", (Node("n", 4, 4, Device("cpu")),), LINK, LINK)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), stages=st.integers(1, 5))
def test_enumeration_finds_every_partition_once(data, stages, profiles, partitions_of) -> None:
    graph = condense(data.draw(profiles(most=6)))
    expected = sorted(partitions_of(graph, stages))
    enumeration = Enumeration(all_downsets(graph, 1000))
    assert enumeration.count(stages) == len(expected)
    assert sorted(enumeration.every_partition(stages)) == expected


def test_candidates_come_by_their_bounds_and_the_simplest_of_equals_first(
    chain, partitions_of
) -> None:
    request = PlanRequest("job", 32)
    problem = Problem(chain(5), CLUSTER, request, condense(chain(5)))
    orders = open_orders(request, 3, 4)
    layouts = [
        Layout(partition, ((0,), (1,), (2,))) for partition in partitions_of(problem.graph, 3)
    ]
    candidates = Candidates(problem, layouts, 8, orders)
    everything = list(candidates)
    assert len({each.choice for each in everything}) == len(layouts) * len(orders)
    keys = [(each.estimate_s, each.simplicity) for each in everything]
    assert keys == sorted(keys)
    best = [
        next(each for each in everything if (each.choice.schedule, each.choice.warm_up) == order)
        for order in orders
    ]
    assert sorted(candidates.best_of_orders(), key=everything.index) == sorted(
        best, key=everything.index
    )
    for number, each in enumerate(everything):
        assert candidates.next_s == each.estimate_s
        assert candidates.take() == each
        assert candidates.taken == everything[: number + 1]
    assert candidates.next_s == float("inf")


@settings(max_examples=100, deadline=None)
@given(data=st.data(), reach=st.sampled_from((FEW, EVERY, FAR)))
def test_what_is_near_a_layout_is_a_partition_again(data, reach, profiles, partitions_of) -> None:
    graph = condense(data.draw(profiles(most=6)))
    partitions = set(partitions_of(graph, 3))
    if not partitions:
        return
    layout = Layout(data.draw(st.sampled_from(sorted(partitions))), ((0,), (1,), (2,)))
    near = list(neighbours(layout, graph, [1.0] * len(graph), reach))
    assert {one.partition for one in near} <= partitions
    single = [
        other
        for other in partitions
        if any(
            (other[at] ^ layout.partition[at]).bit_count() == 1
            and sum(a != b for a, b in zip(other, layout.partition, strict=True)) == 2
            and other[at + 1] != layout.partition[at + 1]
            for at in range(2)
        )
    ]
    if reach != FAR:
        assert set(single) <= {one.partition for one in near}, (
            "every block that can move alone does"
        )
