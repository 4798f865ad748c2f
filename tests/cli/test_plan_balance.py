"""`pipectl plan --objective max-stage-load`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Command

BASE = ("plan", "--profile", "p.json", "--objective", "max-stage-load")


@pytest.fixture(autouse=True)
def alone(place: Path, profile_document: Callable[..., dict[str, Any]]) -> Path:
    """A profile without a job file beside it."""
    path = Path("p.json")
    path.write_text(json.dumps(profile_document()))
    return path


def test_the_stages_and_their_loads(cli: Command) -> None:
    result = cli(*BASE, "--devices", "4", "--batch-size", "8")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "tiny: 4 stages on 4 devices"
    assert lines[1].startswith("largest stage load 30.0 ms: the smallest possible, in ")
    assert lines[2].split() == ["stage", "device", "ops", "load", "from"]
    assert len([line for line in lines[3:7] if " acc " in line]) == 4
    assert lines[7].startswith("as a 1f1b pipeline of 4 micro-batches: ")


def test_the_answer_as_json(cli: Command) -> None:
    answer = json.loads(cli(*BASE, "--devices", "2", "--json").out)
    assert answer["value_s"] == pytest.approx(0.06)
    assert answer["cut_short"] is False
    assert [stage["nodes"] for stage in answer["stages"]] == [["op0", "op1"], ["op2", "op3"]]


def test_a_job_has_as_many_devices_as_ranks(cli: Command, profile: Path) -> None:
    command = ("plan", "job.yaml", "--objective", "max-stage-load", "--scheduler", "slurm")
    answer = json.loads(cli(*command, "--json").out)
    assert (answer["accelerators"], answer["cpus"]) == (2, 0)
    assert not Path("runs/tiny.plan.json").exists()


@pytest.mark.parametrize(
    "option", [("--explain",), ("--nodes", "1,2"), ("-o", "x"), ("--svg", "x"), ("--planner", "x")]
)
def test_options_of_the_other_objective(cli: Command, option: tuple[str, ...]) -> None:
    result = cli(*BASE, "--devices", "2", *option)
    assert (result.code, result.out) == (2, "")
    assert f"{option[0]}: has no meaning for --objective max-stage-load" in result.err
