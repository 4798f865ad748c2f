"""`pipectl plan JOB`: the job's own plan, and what is said of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Command

PLAN = Path("runs/tiny.plan.json")


def test_plan_shows_stages_a_verdict_and_a_gantt_in_80_columns(
    cli: Command, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = cli("plan", "job.yaml", "--scheduler", "slurm")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "tiny: 2 stages on 2 ranks, 1f1b, 4 micro-batches of 2 (batch 8)"
    assert lines[1].startswith("predicted: ")
    assert lines[5].split()[:10] == ["0", "0", "0", "2", "2.00", "MiB", "20.0", "ms", "40.0", "ms"]
    verdict = [line.partition(":")[0] for line in lines[8:] if line[:1].islower() and ":" in line]
    assert verdict[:4] == ["bottleneck", "it waits", "would help", "search"]
    gantt = [line for line in lines if line.startswith("rank ")]
    assert len(gantt) == 2
    assert all(f"{batch}░" in gantt[0] and f"{batch}█" in gantt[0] for batch in range(4))
    assert lines[-1] == f"plan: {PLAN}"


def test_a_wide_terminal_shows_where_stages_begin_and_end(cli: Command, profile: Path) -> None:
    rows = cli("plan", "job.yaml").out.splitlines()
    assert rows[5].endswith("layer.0 … layer.1")


def test_a_search_that_compiled_the_planner_says_so(
    cli: Command, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = iter((3.0, 15.5, 15.5, 15.7))
    monkeypatch.setattr("pipectl.jobs.plan.compiling_s", lambda: next(spent))
    first, second = (" ".join(cli("plan", "job.yaml").out.split()) for _ in range(2))
    assert "12.5 s of it to compile the planner" in first
    assert "to compile" not in second


def test_a_plan_can_be_printed_where_output_is_ascii(profile: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "pipectl", "plan", "job.yaml", "--scheduler", "local"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "rank 0 0???" in done.stdout


def test_plan_writes_a_file_that_loads(cli: Command, profile: Path) -> None:
    from pipectl.plan import Plan

    printed = cli("plan", "job.yaml", "--json", "--svg", "pictures/plan.svg")
    plan = Plan.load(PLAN)
    answer, written = json.loads(printed.out), json.loads(PLAN.read_text())
    assert {key: answer[key] for key in written if key != "stages"} == {
        key: value for key, value in written.items() if key != "stages"
    }
    assert Plan.from_json(answer) == plan
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,)]
    assert plan.key is not None
    assert Path("pictures/plan.svg").read_text().startswith("<svg ")


def test_plan_without_a_profile_says_how_to_measure(cli: Command, job: Path) -> None:
    result = cli("plan", "job.yaml")
    assert (result.code, result.out) == (3, "")
    assert result.err == (
        "error: runs/tiny.profile.json: no such file\n"
        "  write a new one with: pipectl profile JOB.yaml\n"
    )
    assert not Path("runs").exists()


def test_a_truncated_profile_is_named_and_an_earlier_plan_untouched(
    cli: Command, profile: Path
) -> None:
    PLAN.write_text("earlier")
    profile.write_text(profile.read_text()[:200])
    result = cli("plan", "job.yaml")
    assert (result.code, result.out) == (3, "")
    assert result.err.startswith("error: runs/tiny.profile.json:1:")
    assert "truncated?" in result.err
    assert PLAN.read_text() == "earlier"


@pytest.mark.parametrize("field", ["nodes", "edges", "name"])
def test_a_profile_without_a_field_names_it(
    cli: Command, job: Path, field: str, profile_document: Callable[..., dict[str, Any]]
) -> None:
    Path("p.json").write_text(json.dumps(profile_document(**{field: None})))
    result = cli("plan", "job.yaml", "--profile", "p.json")
    assert result.code == 3
    assert result.err.startswith(f"error: p.json: {field}: missing\n")


def test_a_stale_profile_is_used_with_a_warning(cli: Command, profile: Path) -> None:
    result = cli("plan", "job.yaml", "--set", "optimizer.factory=torch.optim:SGD")
    assert result.code == 0
    assert result.err == (
        "warning: runs/tiny.profile.json was measured for other settings (model, data, optimizer, "
        "batch or ranks per node); measure again with: "
        "pipectl profile job.yaml --set optimizer.factory=torch.optim:SGD\n"
    )


def test_more_stages_than_operators(cli: Command, profile: Path) -> None:
    PLAN.write_text("earlier")
    changes = ("--set", "pipeline.stages=5", "--set", "resources.nodes=5")
    result = cli("plan", "job.yaml", *changes, "--scheduler", "slurm")
    assert (result.code, result.out) == (4, "")
    assert result.err.startswith("error: ")
    assert "5" in result.err
    assert PLAN.read_text() == "earlier"


def test_an_impossible_memory_limit_says_how_much_is_missing(cli: Command, profile: Path) -> None:
    result = cli("plan", "job.yaml", "--set", "pipeline.memory_limit=256MiB")
    assert (result.code, result.out) == (4, "")
    assert "MiB" in result.err
    assert not PLAN.exists()


def test_a_cluster_file_with_other_ranks(cli: Command, profile: Path) -> None:
    from pipectl.cluster import assumed_cluster

    assumed_cluster("mine", [1, 1, 1], 1, None).save(Path("cluster.json"))
    result = cli("plan", "job.yaml", "--set", "cluster=cluster.json")
    assert result.code == 3
    assert "describes 3 ranks, resources: ask for 2" in result.err


def test_the_output_cannot_be_written(cli: Command, profile: Path) -> None:
    result = cli("plan", "job.yaml", "-o", "job.yaml/plan.json")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: job.yaml: cannot be created: File exists\n")


def test_a_job_keeps_the_micro_batches_of_its_first_plan_until_asked(
    cli: Command, job: Path, profile_document: Callable[..., dict[str, Any]]
) -> None:
    from pipectl.plan import Plan

    def measured(fixed_s: float) -> None:
        """Times with a fixed part; the larger that is, the fewer micro-batches are best."""
        document = profile_document(key=None, coupled=["layer.2"])
        for node in document["nodes"]:
            node["timings"] = {"1": [fixed_s + 0.005] * 2, "8": [fixed_s + 0.04] * 2}
            node["forward_s"] = node["backward_s"] = fixed_s + 0.01
        Path("runs").mkdir(exist_ok=True)
        Path("runs/tiny.profile.json").write_text(json.dumps(document))

    def planned(*options: str) -> tuple[int, str, str]:
        result = cli("plan", "job.yaml", "--set", "pipeline.micro_batches=auto", *options)
        assert result.code == 0, result.err
        return Plan.load(PLAN).micro_batches, result.out, result.err

    measured(0.0)
    many, out, err = planned()
    assert "as in the plan before" not in out
    assert err.startswith("warning: layer.2 computes over all samples of a micro-batch")
    measured(1.0)
    kept, out, _ = planned()
    assert kept == many
    assert f"micro-batches: {many}, as in the plan before" in out
    few, out, _ = planned("--new-micro-batches")
    assert few < many
    assert "as in the plan before" not in out
    assert planned()[0] == few
    assert cli("plan", "job.yaml", "--set", "pipeline.micro_batches=8").err == ""
    assert Plan.load(PLAN).micro_batches == 8


def test_one_rank_is_recommended_if_stages_cost_more_than_they_gain(
    cli: Command, profile: Path
) -> None:
    slow = ("--communication-scale", "100000")
    result = cli("lab", "plan", "job.yaml", "--scheduler", "slurm", *slow)
    assert "no pipeline: one rank alone takes" in result.out


def test_a_job_on_other_numbers_of_nodes(cli: Command, profile: Path) -> None:
    result = cli("plan", "job.yaml", "--nodes", "1,2,3", "--scheduler", "slurm", "--json")
    answer = json.loads(result.out)
    assert [count["ranks"] for count in answer["counts"]] == [1, 2, 3]
    assert [count["feasible"] for count in answer["counts"]] == [False, True, True]
    assert not PLAN.exists()


def test_fewer_devices_are_a_question_and_not_the_jobs_plan(cli: Command, profile: Path) -> None:
    free = ("--set", "pipeline.stages=auto", "--scheduler", "slurm")
    result = cli("plan", "job.yaml", "--devices", "1", *free)
    assert result.out.startswith("tiny: 1 stage on 1 rank")
    assert not PLAN.exists()


def test_more_devices_than_the_job_has_ranks(cli: Command, profile: Path) -> None:
    result = cli("plan", "job.yaml", "--devices", "3", "--scheduler", "slurm")
    assert result.code == 2
    assert "--nodes 1,2,4 plans for other sizes" in result.err
