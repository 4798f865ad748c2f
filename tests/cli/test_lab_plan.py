"""`pipectl lab plan`: other planners, objectives, techniques and links."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.planner.baselines import NAMES, OWN

PROFILE = ("lab", "plan", "--profile", "p.json")
BASE = (*PROFILE, "--devices", "2", "--set", "training.batch_size=8")
BALANCE = (*PROFILE, "--objective", "max-stage-load", "--devices")
LONG_MIDDLE = ((0.001, 1), (0.1, 1), (0.001, 1), (0.001, 1))
"""Seconds and bytes of parameters: of two ranks, one has nothing to do without replicas."""


@pytest.mark.parametrize("name", NAMES)
def test_planners_can_be_compared(cli, alone, name):
    found = cli(*BASE, "--planner", name, "--json").json
    assert found["search"]["planner"] == name
    assert found["planning_s"] == found["search"]["planning_s"] > 0
    assert found["value_s"] == found["predicted"]["step_time_s"]
    assert sum(len(stage["nodes"]) for stage in found["stages"]) == 4
    text = cli(*BASE, "--planner", name, "--explain").out
    assert f"search:     {'' if name == OWN else f'by {name}, '}took " in text
    assert "cannot be submitted" not in text
    assert "with other resources or settings:" in text
    table = cli(*PROFILE, "--planner", name, "--nodes", "1,2")
    assert (table.code, table.out.count("\n    ")) == (0, 2)


def test_a_plan_with_replicas_is_written_if_asked_and_can_be_submitted(
    cli, profile, profile_document
):
    document = profile_document(key=json.loads(profile.read_text())["key"])
    for node, (seconds, size) in zip(document["nodes"], LONG_MIDDLE, strict=True):
        node |= {"forward_s": seconds, "backward_s": seconds, "parameter_bytes": size}
    profile.write_text(json.dumps(document))
    options = ("--scheduler", "slurm", "--set", "pipeline.stages=auto")
    dapple = ("lab", "plan", "job.yaml", "--planner", "dapple", *options)
    assert cli(*dapple, "--json").json["cannot_run"] == []
    assert not Path("runs/tiny.plan.json").exists()
    shown = cli(*dapple, "-o", "runs/tiny.plan.json")
    assert "replicas: the ranks of a stage take samples of every micro-batch" in shown.out
    assert "cannot be submitted" not in shown.out
    assert "asks for" not in cli("submit", "job.yaml", *options).err


def test_errors_name_keys_of_the_job(cli, profile, alone):
    small = ("--memory-limit", "257MiB")
    for command in (BASE, ("lab", "plan", "job.yaml", "--scheduler", "slurm")):
        assert "pipeline.memory_limit 2" in cli(*command, *small).err
    dapple = cli(*BASE, *small, "--planner", "dapple").err
    assert "give a larger pipeline.memory_limit, or use --planner pipectl" in dapple


def test_replicas_come_only_if_they_are_allowed(cli, place, profile_document):
    """The first operator has nearly all of the time."""
    document = profile_document()
    document["nodes"][0] |= {"forward_s": 0.1, "backward_s": 0.2}
    Path("p.json").write_text(json.dumps(document))
    batch = ("--set", "training.batch_size=64")
    line = (*PROFILE, "--devices", "4", *batch, "--bandwidth", "100GB/s", "--json")
    without, several = cli(*line).json, cli(*line, "--allow", "replicas").json
    assert {stage["replicas"] for stage in without["stages"]} == {1}
    assert max(stage["replicas"] for stage in several["stages"]) > 1
    assert (several["replication"], several["cannot_run"]) == ("whole", [])
    assert several["value_s"] < without["value_s"]
    assert cli(*line, "--allow", "split").json["replication"] == "split"
    everything = "replicas,split,recompute,offload,pipefb,schedules"
    assert cli(*line, "--allow", everything).json["value_s"] <= without["value_s"] * 1.001


@pytest.fixture
def chain(cli):
    """The answer for a chain of operators of 1, 2 and 3 s on two devices."""
    nodes = [
        {"id": f"n{index}", "forward_s": 0.4 * index, "backward_s": 0.6 * index}
        | {"parameter_bytes": 0, "memory_bytes": 100, "output_bytes": 10**6}
        for index in (1, 2, 3)
    ]
    edges = [["n1", "n2"], ["n2", "n3"]]
    document = {"version": 1, "name": "chain", "micro_batch_size": 2, "nodes": nodes}

    def balance(*arguments, **changes):
        Path("p.json").write_text(json.dumps({**document, "edges": edges, **changes}))
        found: dict[str, Any] = cli(*BALANCE, "2", "--json", *arguments).json
        return found

    return balance


def test_the_smallest_largest_load(cli, chain):
    batch = ("--set", "training.batch_size=8")
    found = chain(*batch)
    assert (found["objective"], found["exact"]) == ("max-stage-load", True)
    assert found["value_s"] == pytest.approx(found["lower_bound_s"]) == pytest.approx(3.0)
    assert [stage["nodes"] for stage in found["stages"]] == [["n1", "n2"], ["n3"]]
    assert found["stages"][0] == {
        "nodes": ["n1", "n2"], "replicas": 1, "devices": [0], "device": "acc",
        "load_s": pytest.approx(3.0),
    }  # fmt: skip
    assert found["predicted"]["step_time_s"] == pytest.approx(15.0, rel=0.01)
    assert (found["bandwidth_bytes_per_s"], found["cut_short"]) == (None, False)
    result = cli(*BALANCE, "2", *batch)
    lines = result.out.splitlines()
    assert (result.err, lines[0]) == ("", "chain: 2 stages on 2 devices")
    assert lines[1].startswith("largest stage load 3.00 s: the smallest possible, in ")
    assert lines[2].split() == ["stage", "ops", "load", "from"]
    assert [line.split()[1:4] for line in lines[3:5]] == [["2", "3.00", "s"], ["1", "3.00", "s"]]
    assert lines[5].startswith("as a 1f1b pipeline of 4 micro-batches: 15.0 s per step, ")
    linked = chain("--bandwidth", "1MB/s", "--communication-scale", "2")
    assert linked["bandwidth_bytes_per_s"] == pytest.approx(5e5)
    assert linked["value_s"] == pytest.approx(6.0)  # a cut would cost 4 s on either side


def test_backward_operators_send_against_the_stages(chain):
    nodes = [
        {"id": f"{phase[0]}{index}", "phase": phase, "colocate": index, "forward_s": 1.0 * ahead}
        | {"backward_s": 2.0 * (1 - ahead), "parameter_bytes": 0, "output_bytes": 1000}
        for phase, ahead in (("forward", 1), ("backward", 0))
        for index in ((0, 1) if ahead else (1, 0))
    ]
    edges = [["f0", "f1"], ["f1", "b1"], ["b1", "b0"], ["f0", "b0"]]
    found = chain("--set", "training.batch_size=2", nodes=nodes, edges=edges)
    assert found["predicted"]["step_time_s"] == pytest.approx(6.0, rel=0.01)


def test_what_fits_nowhere_and_what_has_no_time_is_no_balance(cli, chain):
    chain()
    result = cli(*BALANCE, "2", "--memory-limit", "50")
    assert (result.code, result.out) == (4, "")
    assert "no partition fits on 2 devices of 50 B each" in result.err
    assert "give more --devices or a larger pipeline.memory_limit" in result.err
    assumed_cluster("small", [2], 2, 60).save(Path("cluster.json"))
    result = cli(*BALANCE, "2", "--cluster", "cluster.json")
    assert (result.code, "on 2 devices of 60 B each" in result.err) == (4, True)
    assert "give more --devices or ranks with more memory" in result.err
    result = cli(*BALANCE, "2", "--budget", "0")
    assert "largest stage load" in result.out or "before any plan was found" in result.err


def test_a_job_is_balanced_over_its_ranks(cli, profile):
    command = ("lab", "plan", "job.yaml", "--objective", "max-stage-load", "--scheduler", "slurm")
    assert cli(*command, "--json").json["accelerators"] == 2
