"""Backward operators that are nodes of their own, in the place of their forward."""

from itertools import pairwise

import pytest

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.graph.blocks import condense
from pipectl.planner.graph.imported import folded
from pipectl.profile import Profile


def node(name: str, seconds: float, group: int | None, size: int = 1000) -> dict[str, object]:
    phase = "backward" if name.startswith("b") else "forward"
    times = {"forward_s": seconds, "backward_s": 0.0}
    if phase == "backward":
        times = {"forward_s": 0.0, "backward_s": seconds}
    found = {"id": name, "phase": phase, "parameter_bytes": 0, "output_bytes": size, **times}
    return found if group is None else {**found, "colocate": group}


def profile(nodes: list[dict[str, object]], *edges: str) -> Profile:
    pairs = [edge.split(">") for edge in edges]
    return Profile.from_json({"name": "p", "nodes": nodes, "edges": pairs})


def separate(*more: str) -> Profile:
    """f0, f1, f2 and their backward operators, whose values are 10, 20 and 30 bytes."""
    nodes = [node(f"f{i}", 1.0, i) for i in range(3)]
    nodes += [node(f"b{i}", 2.0, i, size=10 * (i + 1)) for i in (2, 1, 0)]
    return profile(nodes, "f0>f1", "f1>f2", "f2>b2", "b2>b1", "b1>b0", *more)


def test_other_profiles_stay_as_they_are(chain):
    plain = chain(3)
    assert folded(plain) is plain


def test_edges_of_backward_operators_follow_the_forward():
    found = folded(separate())
    assert set(found.edges) == {
        *(("f0", "f1"), ("f1", "f2"), ("f2", "b2")),
        *(("b0", "b1"), ("b1", "b2")),
    }
    gradients = {o.id: o.gradient_bytes for o in found.operators if o.id.startswith("b")}
    assert gradients == {"b0": 20, "b1": 30, "b2": 0}
    sizes = {o.id: o.output_bytes for o in found.operators}
    assert sizes == {"f0": 1000, "f1": 1000, "f2": 1000, "b0": 0, "b1": 0, "b2": 0}
    assert all(not o.saved for o in found.operators if o.id.startswith("b"))
    assert sorted(o.id for o in found.operators) == sorted(o.id for o in separate().operators)


def test_edges_that_are_drawn_with_the_forward_are_gradients_too():
    """Some files draw edges between backward operators like those of the forward."""
    nodes = [node("f0", 1.0, 0), node("f1", 1.0, 1), node("b0", 2.0, 0, 7), node("b1", 2.0, 1, 9)]
    found = folded(profile(nodes, "f0>f1", "b0>b1"))
    assert set(found.edges) == {("f0", "f1"), ("b0", "b1")}
    assert {o.id: o.gradient_bytes for o in found.operators}["b0"] == 7


def test_a_backward_operator_without_forward_stands_where_its_neighbours_say():
    """b1 reads from b9, which reads from b2: b9 lies between their stages."""
    nodes = [*(node(f"f{i}", 1.0, i) for i in (1, 2)), node("b2", 2.0, 2), node("b9", 2.0, None)]
    found = folded(profile([*nodes, node("b1", 2.0, 1)], "f1>f2", "f2>b2", "b2>b9", "b9>b1"))
    assert {("b9", "b2"), ("b1", "b9")} <= set(found.edges)
    graph = condense(found)
    names = [
        "".join(sorted(found.operators[i].id for i in block.operators)) for block in graph.blocks
    ]
    assert names == ["b1f1", "b9", "b2f2"]


def test_a_value_that_only_an_earlier_stage_reads_travels_with_the_backward():
    found = folded(separate("f2>b0"))
    assert ("b0", "f2") in found.edges
    assert {o.id: o.gradient_bytes for o in found.operators}["b0"] == 1000


def test_chosen_stages_say_what_comes_first():
    """Two branches side by side; the value of one is read by the other's backward."""
    nodes = [node("f0", 1.0, 0), node("f1", 1.0, 1), node("b1", 2.0, 1), node("b0", 2.0, 0)]
    side = profile(nodes, "f0>b1")
    assert folded(side, [["f0", "b0"], ["f1", "b1"]]).edges == (("f0", "b1"),)
    assert folded(side, [["f1", "b1"], ["f0", "b0"]]).edges == (("b1", "f0"),)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_step_is_that_of_the_chain_it_stands_for(stages):
    """Each forward with its backward is an operator of 1 s and 2 s."""
    link = Link(0.0, 1e9)
    nodes = tuple(Node(f"n{i}", 1, 1, Device("cpu")) for i in range(3))
    cluster = Cluster("c", "test", nodes, link, link)
    request = PlanRequest("job", 6, micro_batches=6, stages=stages)
    whole = [
        {"id": f"n{i}", "forward_s": 1.0, "backward_s": 2.0, "parameter_bytes": 0}
        | {"output_bytes": 1000}
        for i in range(3)
    ]
    same = profile(whole, *(f"n{a}>n{b}" for a, b in pairwise(range(3))))
    steps = [
        make_plan(each, cluster, request).prediction.step_time_s
        for each in (folded(separate()), same)
    ]
    assert steps[0] == pytest.approx(steps[1], rel=1e-4)
