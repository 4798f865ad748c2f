"""Profiles that others wrote: absent fields, any order of nodes, and keys of their own."""

import json

import pytest

from pipectl.errors import DataFileError
from pipectl.planner.graph.imported import pipedream_pruned, pruned_if_pipedream
from pipectl.profile import Profile


def node(name, **more):
    costs = {"forward_s": 1.0, "backward_s": 2.0, "parameter_bytes": 0, "output_bytes": 8}
    return {"id": name, "name": name, **costs, **more}


def read(nodes, edges, **more):
    nodes = [node(each) if isinstance(each, str) else each for each in nodes]
    document = {"name": "imported", "nodes": nodes, "edges": list(map(list, edges)), **more}
    return Profile.from_json(document, file="p.json")


def test_the_micro_batch_size_has_two_names_and_is_one_if_absent():
    said = "the micro-batch size is not given: taken as 1 sample"
    for more, size in (({}, 1), ({"micro_batch_size": 4}, 4), ({"profile_batch_size": 4}, 4)):
        profile = read("a", [], **more)
        assert profile.micro_batch_size == size
        assert (said in profile.assumptions) == (not more)


@pytest.mark.parametrize(
    ("given", "edges", "order"), [("dacb", ["ab", "bd"], "acbd"), ("zyx", ["zx"], "zyx")]
)
def test_nodes_are_sorted_as_little_as_possible(given, edges, order):
    assert "".join(operator.id for operator in read(given, edges).operators) == order


def test_keys_that_only_others_write_are_kept():
    more = {"phase": "forward", "colocate": 3, "memory_bytes": 7, "transfer_s": 0.25}
    given = {"edge_bytes": [5, 6], "cluster": {"cpus": 1}}
    profile = read([node("a", **more), "b", "c"], ["ab", "bc"], **given)
    first, second, _ = profile.operators
    assert (first.phase, first.group) == ("forward", "3")
    assert (first.memory_bytes, first.transfer_s) == (7, 0.25)
    assert (first.gradient_bytes, second.gradient_bytes) == (0, 8)  # backwards are nodes, too
    assert profile.edge_bytes == {("a", "b"): 5, ("b", "c"): 6}
    assert profile.cluster == {"cpus": 1}
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@pytest.mark.parametrize(
    ("first", "more", "fault"),
    [
        ({}, {"edges": [["a", "b"], ["b", "c"], ["c", "b"]]}, "edges: there is a cycle.*'b', 'c'"),
        ({"cpu_only": True}, {}, r"nodes\[0\]\.cpu_only: stages on CPUs"),
        ({"phase": "sideways"}, {}, r"nodes\[0\]\.phase: must be forward or backward"),
        ({}, {"edge_bytes": [5]}, "edge_bytes: has 1 sizes for 2 edges"),
        ({}, {"carried": [["mean", "d"]]}, "carried: 'mean': no node has the id 'd'"),
        ({}, {"edge_bytes": [5, -5]}, r"edge_bytes\[1\]: must be at least 0, not -5"),
    ],
)
def test_what_cannot_be_planned_is_refused_at_its_place(first, more, fault):
    given = {"nodes": [node("a", **first), "b", "c"], "edges": ["ab", "bc"], **more}
    with pytest.raises(DataFileError, match=rf"p\.json: {fault}"):
        read(**given)


def test_pipedream_rule_drops_inputs_then_sinks():
    first, second = "__getitem__(0)", "__getitem__(1)"
    edges = [("Input0", "Conv"), ("Conv", first), ("Conv", second), (second, "Linear")]
    profile = read(["Input0", "Conv", first, second, "Linear"], edges)
    pruned = pipedream_pruned(profile)
    assert [operator.id for operator in pruned.operators] == ["Conv", second, "Linear"]
    assert pruned.edges == (("Conv", second), (second, "Linear"))
    assert pruned_if_pipedream(profile) == profile
