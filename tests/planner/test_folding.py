"""Backward operators that are nodes of their own, in the place of their forward."""

from itertools import pairwise

import pytest

from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.graph.imported import folded
from pipectl.profile import Profile
from tests.planner.gate.checked_plans import cluster_of


def node(name, group=None, size=1000):
    """A forward of 1 s, or a backward of 2 s if its name begins so."""
    backward = name.startswith("b")
    found = {"id": name, "phase": "backward" if backward else "forward", "parameter_bytes": 0}
    found |= {"forward_s": 1.0 - backward, "backward_s": 2.0 * backward, "output_bytes": size}
    return found if group is None else {**found, "colocate": group}


def profile(nodes, *edges):
    pairs = [edge.split(">") for edge in edges]
    return Profile.from_json({"name": "p", "nodes": nodes, "edges": pairs})


def separate(*more):
    """f0, f1, f2 and their backward operators, whose values are 10, 20 and 30 bytes."""
    nodes = [node(f"f{i}", i) for i in range(3)]
    nodes += [node(f"b{i}", i, size=10 * (i + 1)) for i in (2, 1, 0)]
    return profile(nodes, "f0>f1", "f1>f2", "f2>b2", "b2>b1", "b1>b0", *more)


@pytest.mark.parametrize(
    ("more", "edges", "gradient"),
    [
        pytest.param((), set(), 20, id="chain"),
        pytest.param(
            ("f2>b0",),
            {("b0", "f2")},
            1000,
            id="a value that an earlier stage reads travels with the backward",
        ),
    ],
)
def test_edges_of_backward_operators_follow_the_forward(more, edges, gradient):
    found = folded(separate(*more))
    follow = {("f0", "f1"), ("f1", "f2"), ("f2", "b2"), ("b0", "b1"), ("b1", "b2")}
    assert set(found.edges) == follow | edges
    backwards = {o.id: o for o in found.operators if o.id.startswith("b")}
    assert sorted(backwards) == ["b0", "b1", "b2"]
    assert [backwards[f"b{i}"].gradient_bytes for i in range(3)] == [gradient, 30, 0]
    assert not any(o.saved or o.output_bytes for o in backwards.values())
    assert [o.output_bytes for o in found.operators if o.id.startswith("f")] == [1000] * 3


def test_edges_that_are_drawn_with_the_forward_are_gradients_too():
    """Some files draw edges between backward operators like those of the forward."""
    nodes = [node("f0", 0), node("f1", 1), node("b0", 0, 7), node("b1", 1, 9)]
    found = folded(profile(nodes, "f0>f1", "b0>b1"))
    assert set(found.edges) == {("f0", "f1"), ("b0", "b1")}
    assert {o.id: o.gradient_bytes for o in found.operators}["b0"] == 7


def test_chosen_stages_say_what_comes_first():
    """Two branches side by side; the value of one is read by the other's backward."""
    side = profile([node("f0", 0), node("f1", 1), node("b1", 1), node("b0", 0)], "f0>b1")
    assert folded(side, [["f0", "b0"], ["f1", "b1"]]).edges == (("f0", "b1"),)
    assert folded(side, [["f1", "b1"], ["f0", "b0"]]).edges == (("b1", "f0"),)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_step_is_that_of_the_chain_it_stands_for(stages):
    whole = [{**node(f"n{i}"), "phase": None, "backward_s": 2.0} for i in range(3)]
    same = profile(whole, *(f"n{a}>n{b}" for a, b in pairwise(range(3))))
    request = PlanRequest("job", 6, micro_batches=6, stages=stages)
    steps = [
        make_plan(each, cluster_of(3), request).predicted_step_s
        for each in (folded(separate()), same)
    ]
    assert steps[0] == pytest.approx(steps[1], rel=1e-4)
