"""`pipectl plan --profile F`: any profile, no job file, no torch, no MPI."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipectl.cluster import assumed_cluster

if TYPE_CHECKING:
    from conftest import Command

WORKLOADS = os.environ.get("PIPECTL_WORKLOADS")
ARGUMENTS = ("plan", "--profile", "p.json")
BATCH = ("--set", "training.batch_size=8")
TWO = (*ARGUMENTS, "--devices", "2", *BATCH)


def test_a_profile_and_a_number_of_devices_are_enough(cli: Command, alone: Path) -> None:
    result = cli(*TWO, "--set", "pipeline.micro_batches=4")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("tiny: 2 stages on 2 ranks, 1f1b, 4 micro-batches of 2")
    assert "plan:" not in result.out
    assert {path.name for path in Path().iterdir()} == {"bin", "p.json"}


def test_neither_torch_nor_mpi_is_imported(alone: Path) -> None:
    program = (
        "import sys; from pipectl.cli import main\n"
        "for more in ([], ['--explain'], ['--json']):\n"
        "    assert main(['plan', '--profile', 'p.json', '--devices', '2', *more]) == 0\n"
        "assert main(['plan', '--profile', 'p.json', '--nodes', '1,2']) == 0\n"
        "assert not {'torch', 'mpi4py'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_json_has_the_documented_keys(cli: Command, alone: Path) -> None:
    answer = json.loads(cli(*TWO, "--json").out)
    assert answer["objective"] == "step-time"
    assert answer["value_s"] == answer["predicted"]["step_time_s"]
    assert answer["planning_s"] > 0
    assert answer["cut_short"] is False
    assert [stage["replicas"] for stage in answer["stages"]] == [1, 1]
    assert [stage["devices"] for stage in answer["stages"]] == [[0], [1]]
    assert [node for stage in answer["stages"] for node in stage["nodes"]] == [
        *("op0", "op1", "op2", "op3")
    ]
    assert len(answer["predicted"]["peak_memory_bytes"]) == 2
    assert answer["without_pipeline"]["single_rank"]["step_time_s"] > answer["value_s"]


def test_a_cluster_file_says_how_many(cli: Command, alone: Path) -> None:
    assumed_cluster("mine", [2, 2], 2, None).save(Path("c.json"))
    whole = json.loads(cli(*ARGUMENTS, "--cluster", "c.json", "--json").out)
    assert whole["node_of_rank"] == [0, 0, 1, 1]
    part = json.loads(cli(*ARGUMENTS, "--cluster", "c.json", "--devices", "3", "--json").out)
    assert part["node_of_rank"] == [0, 0, 1]


def test_the_devices_that_an_imported_profile_ships_are_used(
    cli: Command, place: Path, profile_document: Callable[..., dict[str, Any]]
) -> None:
    shipped = {"accelerators": 3, "memory_limit_bytes": 2.0**30}
    Path("p.json").write_text(json.dumps(profile_document(cluster=shipped)))
    answer = json.loads(cli(*ARGUMENTS, "--json").out)
    assert len(answer["node_of_rank"]) == 3
    assert answer["memory_limit_bytes"] == 2**30
    limit = ("--set", "pipeline.memory_limit=2GiB")
    other = json.loads(cli(*ARGUMENTS, "--devices", "2", *limit, "--json").out)
    assert len(other["node_of_rank"]) == 2
    assert other["memory_limit_bytes"] == 2**31


def test_the_batch_is_assumed_and_said_to_be(cli: Command, alone: Path) -> None:
    answer = json.loads(cli(*ARGUMENTS, "--devices", "2", "--json").out)
    assert answer["batch_size"] == 16
    said = "the batch is not given: taken as 16 samples (--set training.batch_size=N sets it)"
    assert said in answer["assumptions"]


def test_keys_of_a_job_can_be_set_without_one(cli: Command, alone: Path) -> None:
    keys = ("--set", "pipeline.stages=2", "--set", "pipeline.schedule=gpipe")
    answer = json.loads(cli(*ARGUMENTS, "--devices", "4", *BATCH, *keys, "--json").out)
    assert (len(answer["stages"]), answer["schedule"], answer["batch_size"]) == (2, "gpipe", 8)


def test_an_explanation_says_where_the_step_goes_and_what_would_help(
    cli: Command, alone: Path
) -> None:
    result = cli(*TWO, "--set", "pipeline.micro_batches=4", "--explain")
    assert (result.code, result.err) == (0, "")
    for said in (
        "bottleneck: rank 0 (stage 0), which computes for ",
        "would help: ",
        "  forward and backward               240 ms",
        "busiest link: device",
        "checkpoints: while writing one, rank 0 holds ",
        "other plans:",
        "  1 stage",
        "what more would buy:",
        "  one more node ",
        "  1 GiB more for every rank          nothing: memory is not limited",
        "  links between nodes twice as fast  ",
        "  8 micro-batches ",
        "(only micro-batches of 2 were measured",
    ):
        assert f"\n{said}" in result.out


def test_an_explanation_as_json(cli: Command, alone: Path) -> None:
    found = json.loads(cli(*TWO, "--explain", "--json").out)["explanation"]
    assert found["binds"] == "rank"
    assert found["busiest_rank"]["stages"] == [0]
    assert found["busiest_link"]["between"] == "node"
    assert {"change", "step_time_s", "gain", "reason"} == set(found["offers"][0])
    times = [other["step_time_s"] for other in found["alternatives"]]
    assert times == sorted(times) != []


def test_numbers_of_nodes_as_json(cli: Command, alone: Path) -> None:
    batch = ("--set", "training.batch_size=64")
    answer = json.loads(cli(*ARGUMENTS, "--nodes", "2,1", *batch, "--json").out)
    one, two = answer["counts"]
    assert (one["nodes"], two["nodes"]) == (1, 2)
    assert (one["efficiency"], one["bubble"]) == (1.0, pytest.approx(0.0))
    assert two["efficiency"] == pytest.approx(one["step_time_s"] / two["step_time_s"] / 2)
    assert one["node_hours_per_1000_steps"] == pytest.approx(one["step_time_s"] * 1000 / 3600)
    assert answer["pays_until_nodes"] == 2


def test_numbers_of_nodes_that_do_not_fit_say_why(cli: Command, alone: Path) -> None:
    result = cli(*ARGUMENTS, "--nodes", "1,4", "--set", "pipeline.memory_limit=268MiB")
    assert result.code == 0
    assert re.search(r"^ +1 +1 +- +- +-", result.out, re.MULTILINE)
    assert "1 node: the one with the smallest peak found needs" in result.out
    assert "efficiency is against 4 nodes, the fewest on which the model fits" in result.out


def test_data_parallelism_is_recommended_if_it_is_faster(cli: Command, alone: Path) -> None:
    assumed_cluster("fast", [4], 4, None).save(Path("c.json"))
    batch = ("--set", "training.batch_size=16")
    text = " ".join(cli(*ARGUMENTS, "--cluster", "c.json", *batch).out.split())
    assert "would help: no pipeline: data parallelism on 4 ranks takes about " in text


def test_a_plan_is_written_where_it_is_asked_for(cli: Command, alone: Path) -> None:
    from pipectl.plan import Plan

    assert cli(*ARGUMENTS, "--devices", "2", "-o", "out/plan.json", "--svg", "out/p.svg").code == 0
    assert len(Plan.load(Path("out/plan.json")).stages) == 2
    assert Path("out/p.svg").read_text().startswith("<svg ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "nothing to plan"),
        ("--profile p.json", "nothing says on how many devices to plan"),
        ("--profile p.json --devices 0", "--devices"),
        ("--profile p.json --devices 2 --set name=x", "--set name=x: there is no job to change"),
        ("--profile p.json --devices 2 --set pipeline.stages=0", "must be a whole number of at"),
        ("--profile p.json --devices 2 --set pipeline.memory_limit=x", "is not a size"),
        ("--profile p.json --devices 2 --set pipeline.memory_limit=0", "must be more than 0"),
        ("--profile p.json --devices 2 --scheduler slurm", "--scheduler: is about a job"),
        ("--profile p.json --devices 2 --nodes 1,2", "--devices: --nodes says how"),
        ("--profile p.json --nodes 1,x", "--nodes: '1,x' is not a list of numbers"),
        ("--profile p.json --nodes 0", "--nodes: '0': each must be"),
        ("--profile p.json --nodes 1 --explain", "--explain: cannot be used with"),
        ("--profile p.json --nodes 1 -o x", "-o: cannot be used with --nodes"),
        ("--objective max-stage-load", "use `pipectl lab plan --objective` instead"),
        ("--batch-size 8", "use `--set training.batch_size=N` instead"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    cli: Command, alone: Path, line: str, message: str
) -> None:
    result = cli("plan", *line.split())
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_more_devices_than_the_cluster_has(cli: Command, alone: Path) -> None:
    assumed_cluster("mine", [2], 2, None).save(Path("c.json"))
    result = cli(*ARGUMENTS, "--cluster", "c.json", "--devices", "3")
    assert (result.code, result.out) == (2, "")
    assert "--devices 3: the cluster 'mine' has 2 ranks" in result.err


def test_what_does_not_fit_is_infeasible(cli: Command, alone: Path) -> None:
    result = cli(*TWO, "--set", "pipeline.memory_limit=256MiB")
    assert (result.code, result.out) == (4, "")


@pytest.mark.skipif(WORKLOADS is None, reason="PIPECTL_WORKLOADS is not set")
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("dapple-vgg-19-pbs-32", 4),
        ("dnnpart-throughput-layer-bert24_training", None),
        ("pipedream-vgg16", 4),
        ("piper-bert32a100", None),
    ],
)
def test_imported_profiles_are_planned_as_they_are(
    cli: Command, name: str, devices: int | None
) -> None:
    path = Path(str(WORKLOADS)) / f"{name}.json"
    how_many = () if devices is None else ("--devices", str(devices))
    result = cli("plan", "--profile", str(path), *how_many, "--json")
    assert result.code == 0, result.err
    answer = json.loads(result.out)
    assert len(answer["stages"]) > 1
    nodes = [node for stage in answer["stages"] for node in stage["nodes"]]
    listed = {node["id"]: node["name"] for node in json.loads(path.read_text())["nodes"]}
    dropped = [listed[name] for name in sorted(set(listed) - set(nodes))]
    assert len(nodes) == len(set(nodes))
    assert all(each.startswith(("Input", "__getitem__")) for each in dropped)
    assert answer["value_s"] > 0
