"""What `plan` says besides the plan: why, on how many nodes, and whether it is worth it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipectl.cluster import assumed_cluster

if TYPE_CHECKING:
    from conftest import Command

BASE = ("plan", "--profile", "p.json", "--batch-size", "8")
EXPLAIN = (*BASE, "--devices", "2", "--explain")


@pytest.fixture
def alone(place: Path, profile_document: Callable[..., dict[str, Any]]) -> Path:
    """A profile without a job file beside it."""
    path = Path("p.json")
    path.write_text(json.dumps(profile_document()))
    return path


def test_an_explanation_says_what_binds_and_what_would_help(cli: Command, alone: Path) -> None:
    result = cli(*EXPLAIN, "--micro-batches", "4")
    assert (result.code, result.err) == (0, "")
    for said in (
        "rank 0 (stage 0) binds; its ",
        "  forward and backward               240 ms",
        "busiest link: device",
        "checkpoints: while one is written, rank 0 holds up to ",
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
    found = json.loads(cli(*EXPLAIN, "--json").out)["explanation"]
    assert found["binds"] == "rank"
    assert found["busiest_rank"]["stages"] == [0]
    assert found["busiest_link"]["between"] == "node"
    assert {"change", "step_time_s", "gain", "reason"} == set(found["offers"][0])
    times = [other["step_time_s"] for other in found["alternatives"]]
    assert times == sorted(times) != []


def test_the_table_as_json(cli: Command, alone: Path) -> None:
    command = ("plan", "--profile", "p.json", "--nodes", "2,1", "--batch-size", "64", "--json")
    answer = json.loads(cli(*command).out)
    one, two = answer["counts"]
    assert (one["nodes"], two["nodes"]) == (1, 2)
    assert (one["efficiency"], one["bubble"]) == (1.0, pytest.approx(0.0))
    assert two["efficiency"] == pytest.approx(one["step_time_s"] / two["step_time_s"] / 2)
    assert one["node_hours_per_1000_steps"] == pytest.approx(one["step_time_s"] * 1000 / 3600)
    assert answer["pays_until_nodes"] == 2


def test_counts_that_do_not_fit_say_why(cli: Command, alone: Path) -> None:
    command = ("plan", "--profile", "p.json", "--nodes", "1,4", "--memory-limit", "268MiB")
    result = cli(*command)
    assert result.code == 0
    assert re.search(r"^ +1 +1 +- +- +-", result.out, re.MULTILINE)
    assert "1 node: the one with the smallest peak found needs" in result.out
    assert "efficiency is against 4 nodes, the fewest on which the model fits" in result.out


def test_a_job_on_other_numbers_of_nodes(cli: Command, profile: Path) -> None:
    result = cli("plan", "job.yaml", "--nodes", "1,2,3", "--scheduler", "slurm", "--json")
    answer = json.loads(result.out)
    assert [count["ranks"] for count in answer["counts"]] == [1, 2, 3]
    assert [count["feasible"] for count in answer["counts"]] == [False, True, True]
    assert not Path("runs/tiny.plan.json").exists()


def test_data_parallelism_is_recommended_where_it_is_faster(cli: Command, alone: Path) -> None:
    assumed_cluster("fast", [4], 4, None).save(Path("c.json"))
    result = cli("plan", "--profile", "p.json", "--cluster", "c.json", "--batch-size", "16")
    (line,) = [line for line in result.out.splitlines() if "worth it" in line]
    assert line.startswith(
        "a pipeline is not worth it here: data parallelism on 4 ranks would take about "
    )


def test_one_rank_is_recommended_where_stages_are_asked_for_in_vain(
    cli: Command, profile: Path
) -> None:
    slow = ("--communication-scale", "100000")
    result = cli("plan", "job.yaml", "--scheduler", "slurm", *slow)
    assert "a pipeline is not worth it here: one rank takes" in result.out
    assert not Path("runs/tiny.plan.json").exists()


def test_options_that_a_job_file_has_keys_for_change_the_job(cli: Command, profile: Path) -> None:
    result = cli("plan", "job.yaml", "--micro-batches", "2", "--memory-limit", "1GiB", "--json")
    answer = json.loads(result.out)
    assert (answer["micro_batches"], answer["memory_limit_bytes"]) == (2, 2**30)
    assert json.loads(Path("runs/tiny.plan.json").read_text())["micro_batches"] == 2


def test_fewer_devices_are_a_question_and_not_the_jobs_plan(cli: Command, profile: Path) -> None:
    result = cli(
        "plan",
        "job.yaml",
        "--devices",
        "1",
        "--set",
        "pipeline.stages=auto",
        "--scheduler",
        "slurm",
    )
    assert result.out.startswith("tiny: 1 stage on 1 rank")
    assert not Path("runs/tiny.plan.json").exists()


def test_more_devices_than_the_job_has_ranks(cli: Command, profile: Path) -> None:
    result = cli("plan", "job.yaml", "--devices", "3", "--scheduler", "slurm")
    assert result.code == 2
    assert "--nodes 1,2,4 plans for other sizes" in result.err
