"""`pipectl plan --planner NAME` and `--objective throughput`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipectl.planner.policies import NAMES

if TYPE_CHECKING:
    from conftest import Command

BASE = ("plan", "--profile", "p.json", "--devices", "2", "--batch-size", "8")
LONG_MIDDLE = ((0.001, 1), (0.1, 1), (0.001, 1), (0.001, 1))
"""Seconds and bytes of parameters: of two ranks, one has nothing to do without replicas."""


def document(
    make: Callable[..., dict[str, Any]], costs: tuple[tuple[float, int], ...], **more: Any
) -> dict[str, Any]:
    """The usual profile with other costs."""
    found = make(**more)
    for node, (seconds, size) in zip(found["nodes"], costs, strict=True):
        node |= {"forward_s": seconds, "backward_s": seconds, "parameter_bytes": size}
    return found


@pytest.fixture
def alone(place: Path, profile_document: Callable[..., dict[str, Any]]) -> Path:
    """A profile without a job file beside it."""
    path = Path("p.json")
    path.write_text(json.dumps(profile_document()))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_planners_can_be_compared(cli: Command, alone: Path, name: str) -> None:
    answer = json.loads(cli(*BASE, "--planner", name, "--json").out)
    assert answer["search"]["planner"] == name
    assert answer["planning_s"] == answer["search"]["planning_s"] > 0
    assert answer["value_s"] == answer["predicted"]["step_time_s"]
    assert sum(len(stage["nodes"]) for stage in answer["stages"]) == 4
    text = cli(*BASE, "--planner", name).out
    assert f", by {name} in " in text
    assert "not to be submitted" not in text


def test_other_planners_answer_the_other_questions_too(cli: Command, alone: Path) -> None:
    explained = cli(*BASE, "--planner", "uniform", "--explain")
    assert "what more would buy:" in explained.out
    assert "stages with replicas" not in explained.out
    table = cli(*BASE[:3], "--batch-size", "8", "--planner", "dapple", "--nodes", "1,2")
    assert (table.code, table.out.count("\n    ")) == (0, 2)


def test_a_plan_with_replicas_can_be_submitted(
    cli: Command, profile: Path, profile_document: Callable[..., dict[str, Any]]
) -> None:
    key = json.loads(profile.read_text())["key"]
    profile.write_text(json.dumps(document(profile_document, LONG_MIDDLE, key=key)))
    options = ("--scheduler", "slurm", "--set", "pipeline.stages=auto")
    shown = cli("plan", "job.yaml", "--planner", "dapple", *options)
    assert "replicas: the ranks of a stage take samples of every micro-batch" in shown.out
    assert "not to be submitted" not in shown.out
    answer = json.loads(cli("plan", "job.yaml", "--planner", "dapple", *options, "--json").out)
    assert answer["cannot_run"] == []
    assert "asks for" not in cli("submit", "job.yaml", *options).err


def test_errors_name_options_or_keys_of_the_job(cli: Command, profile: Path, alone: Path) -> None:
    small = ("--memory-limit", "257MiB")
    without = cli(*BASE, *small).err
    assert "--memory-limit 2" in without
    assert "pipeline." not in without
    job = cli("plan", "job.yaml", "--scheduler", "slurm", *small).err
    assert "pipeline.memory_limit 2" in job
    assert "--memory-limit" not in job
    dapple = cli(*BASE, *small, "--planner", "dapple").err
    assert "raise --memory-limit, or use --planner pipectl" in dapple


def test_throughput_for_people_and_programs(cli: Command, alone: Path) -> None:
    throughput = (*BASE, "--objective", "throughput")
    result = cli(*throughput)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("tiny: ")
    assert lines[0].endswith("on 2 of 2 devices, 4 micro-batches of 2 a step")
    assert lines[1].startswith("time per micro-batch ")
    assert ": the least possible, in " in lines[1]
    assert lines[2].split()[:4] == ["stage", "devices", "replicas", "tensor"]
    answer = json.loads(cli(*throughput, "--json").out)
    assert answer["objective"] == "throughput"
    assert answer["micro_batches"] == 4
    assert answer["cut_short"] is False


@pytest.mark.parametrize(
    "option", [("--explain",), ("--nodes", "1,2"), ("-o", "x"), ("--planner", "dapple")]
)
def test_throughput_has_no_plan_to_explain_or_write(
    cli: Command, alone: Path, option: tuple[str, ...]
) -> None:
    result = cli("plan", "--profile", "p.json", "--objective", "throughput", *option)
    assert (result.code, result.out) == (2, "")
    assert f"{option[0]}: has no meaning for --objective throughput" in result.err
