"""Profiles that others wrote: absent fields, any order of nodes, and keys of their own."""

import json
import os
from pathlib import Path

import pytest

from pipectl.errors import DataFileError
from pipectl.planner.graph.imported import pipedream_pruned, prepared
from pipectl.profile import Profile

DIRECTORY = os.environ.get("PIPECTL_WORKLOADS")


def node(name, **more):
    costs = {"forward_s": 1.0, "backward_s": 2.0, "parameter_bytes": 0, "output_bytes": 8}
    return {"id": name, "name": name, **costs, **more}


def document(nodes, edges, **more):
    return {"name": "imported", "nodes": nodes, "edges": edges, **more}


def read(nodes, edges, **more):
    return Profile.from_json(document(nodes, edges, **more), file="p.json")


def test_the_micro_batch_size_has_two_names_and_is_one_if_absent():
    said = "the micro-batch size is not given: taken as 1 sample"
    for more, size in (({}, 1), ({"micro_batch_size": 4}, 4), ({"profile_batch_size": 4}, 4)):
        profile = read([node("a")], [], **more)
        assert profile.micro_batch_size == size
        assert (said in profile.assumptions) == (not more)


@pytest.mark.parametrize(
    ("given", "edges", "order"), [("dacb", ["ab", "bd"], "acbd"), ("zyx", ["zx"], "zyx")]
)
def test_nodes_are_sorted_as_little_as_possible(given, edges, order):
    profile = read([node(name) for name in given], [list(edge) for edge in edges])
    assert "".join(operator.id for operator in profile.operators) == order


def test_cycle_is_named():
    edges = [["a", "b"], ["b", "c"], ["c", "b"]]
    with pytest.raises(DataFileError, match=r"p\.json: edges: there is a cycle.*'b', 'c'"):
        read([node(name) for name in "abc"], edges)


def test_optional_keys_of_a_node_are_kept():
    more = {"phase": "backward", "colocate": 3, "memory_bytes": 7, "transfer_s": 0.25}
    profile = read([node("a", **more)], [])
    (operator,) = profile.operators
    assert (operator.phase, operator.group) == ("backward", "3")
    assert (operator.memory_bytes, operator.transfer_s) == (7, 0.25)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"cpu_only": True}, "cpu_only: stages on CPUs"),
        ({"phase": "sideways"}, "phase: must be forward or backward"),
    ],
)
def test_nodes_that_cannot_be_planned_are_refused(more, fault):
    with pytest.raises(DataFileError, match=rf"nodes\[0\]\.{fault}"):
        read([node("a", **more)], [])


def test_values_go_one_way_where_phases_are_nodes():
    forward, both = read([node("a", phase="forward"), node("b")], []).operators
    assert (forward.gradient_bytes, both.gradient_bytes) == (0, 8)


def test_edges_may_have_sizes():
    nodes = [node(name) for name in "abc"]
    profile = read(nodes, [["a", "b"], ["b", "c"]], edge_bytes=[5, 6], cluster={"cpus": 1})
    assert profile.edge_bytes == {("a", "b"): 5, ("b", "c"): 6}
    assert profile.cluster == {"cpus": 1}
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    with pytest.raises(DataFileError, match="edge_bytes: has 1 sizes for 2 edges"):
        read(nodes, [["a", "b"], ["b", "c"]], edge_bytes=[5])
    with pytest.raises(DataFileError, match=r"edge_bytes\[1\]: must be at least 0, not -5"):
        read(nodes, [["a", "b"], ["b", "c"]], edge_bytes=[5, -5])


def test_pipedream_rule_drops_inputs_then_sinks():
    names = ["Input0", "Conv", "__getitem__(0)", "__getitem__(1)", "Linear"]
    edges = [
        ["Input0", "Conv"],
        ["Conv", "__getitem__(0)"],
        ["Conv", "__getitem__(1)"],
        ["__getitem__(1)", "Linear"],
    ]
    profile = read([node(name) for name in names], edges)
    pruned = pipedream_pruned(profile)
    assert [operator.id for operator in pruned.operators] == ["Conv", "__getitem__(1)", "Linear"]
    assert pruned.edges == (("Conv", "__getitem__(1)"), ("__getitem__(1)", "Linear"))
    assert prepared(profile) == profile


@pytest.mark.skipif(DIRECTORY is None, reason="PIPECTL_WORKLOADS names no directory of profiles")
def test_published_profiles_are_read_as_they_are():
    files = sorted(Path(DIRECTORY).glob("*.json"))
    assert files
    for file in files:
        profile = Profile.load(file)
        source = json.loads(file.read_text())
        assert {o.id for o in profile.operators} == {n["id"] for n in source["nodes"]}
        assert Profile.from_json(profile.to_json()) == profile
