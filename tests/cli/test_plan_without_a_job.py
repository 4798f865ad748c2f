"""`pipectl plan --profile F`: any profile, no job file, no torch, no MPI."""

from __future__ import annotations

import json
import os
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


@pytest.fixture
def alone(place: Path, profile_document: Callable[..., dict[str, Any]]) -> Path:
    """A profile without a job file beside it."""
    path = Path("p.json")
    path.write_text(json.dumps(profile_document()))
    return path


def test_a_profile_and_a_number_of_devices_are_enough(cli: Command, alone: Path) -> None:
    sizes = ("--batch-size", "8", "--micro-batches", "4")
    result = cli(*ARGUMENTS, "--devices", "2", *sizes, "--bandwidth", "8Gbit/s")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("tiny: 2 stages on 2 ranks, schedule 1f1b, 4 micro-batches of 2")
    assert "assumed: the link" not in result.out
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
    assert (done.returncode, done.stderr) == (0, b"")


def test_json_has_the_documented_keys(cli: Command, alone: Path) -> None:
    answer = json.loads(cli(*ARGUMENTS, "--devices", "2", "--batch-size", "8", "--json").out)
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
    other = json.loads(cli(*ARGUMENTS, "--devices", "2", "--memory-limit", "2GiB", "--json").out)
    assert len(other["node_of_rank"]) == 2
    assert other["memory_limit_bytes"] == 2**31


def test_the_batch_is_assumed_and_said_to_be(cli: Command, alone: Path) -> None:
    answer = json.loads(cli(*ARGUMENTS, "--devices", "2", "--json").out)
    assert answer["batch_size"] == 16
    said = "the batch is not given: taken as 16 samples (--batch-size sets it)"
    assert said in answer["assumptions"]


def test_slower_links_make_longer_steps(cli: Command, alone: Path) -> None:
    base = (*ARGUMENTS, "--devices", "2", "--json", "--batch-size", "8")
    times = [
        json.loads(cli(*base, *more).out)["value_s"]
        for more in (
            ("--bandwidth", "1MB/s", "--communication-scale", "0.5"),
            ("--bandwidth", "1MB/s"),
            ("--bandwidth", "1MB/s", "--communication-scale", "4"),
        )
    ]
    assert times == sorted(times)
    assert times[0] < times[2]


def test_a_plan_is_written_where_it_is_asked_for(cli: Command, alone: Path) -> None:
    from pipectl.plan import Plan

    assert cli(*ARGUMENTS, "--devices", "2", "-o", "out/plan.json", "--svg", "out/p.svg").code == 0
    assert len(Plan.load(Path("out/plan.json")).stages) == 2
    assert Path("out/p.svg").read_text().startswith("<svg ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to plan"),
        (("--profile", "p.json"), "nothing says on how many devices to plan"),
        (("--profile", "p.json", "--devices", "0"), "--devices"),
        (("--profile", "p.json", "--devices", "2", "--set", "name=x"), "--set: is about a job"),
        (
            ("--profile", "p.json", "--devices", "2", "--scheduler", "slurm"),
            "--scheduler: is about",
        ),
        (
            ("--profile", "p.json", "--devices", "2", "--nodes", "1,2"),
            "--devices: --nodes says how",
        ),
        (("--profile", "p.json", "--nodes", "1,x"), "--nodes: '1,x' is not a list of numbers"),
        (("--profile", "p.json", "--nodes", "0"), "--nodes: '0': each must be"),
        (("--profile", "p.json", "--nodes", "1", "--explain"), "--explain: cannot be used with"),
        (("--profile", "p.json", "--nodes", "1", "-o", "x"), "-o: cannot be used with --nodes"),
        (("--profile", "p.json", "--devices", "2", "--cpus", "1"), "--cpus: only --objective"),
        (
            ("--profile", "p.json", "--devices", "2", "--planner", "pipectl2"),
            "did you mean 'pipectl'",
        ),
        (("--profile", "p.json", "--devices", "2", "--bandwidth", "fast"), "is not a bandwidth"),
        (("--profile", "p.json", "--devices", "2", "--bandwidth", "0GB/s"), "must be above 0"),
        (("--profile", "p.json", "--bandwidth", f"{'9' * 400}bit/s"), "bandwidth': must be above"),
        (("--profile", "p.json", "--bandwidth", f"{'9' * 400}B/s"), "is not a bandwidth"),
        (("--profile", "p.json", "--devices", "2", "--memory-limit", "x"), "is not a size"),
        (("--profile", "p.json", "--devices", "2", "--budget", "soon"), "is not a duration"),
        (("--profile", "p.json", "--devices", "2", "--communication-scale", "-1"), "above 0"),
        (("--profile", "p.json", "--devices", "2", "--objective", "fun"), "--objective"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    cli: Command, alone: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = cli("plan", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_more_devices_than_the_cluster_has(cli: Command, alone: Path) -> None:
    assumed_cluster("mine", [2], 2, None).save(Path("c.json"))
    result = cli(*ARGUMENTS, "--cluster", "c.json", "--devices", "3")
    assert (result.code, result.out) == (2, "")
    assert "--devices 3: the cluster 'mine' has 2 ranks" in result.err


def test_what_does_not_fit_is_infeasible(cli: Command, alone: Path) -> None:
    result = cli(*ARGUMENTS, "--devices", "2", "--memory-limit", "256MiB")
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
