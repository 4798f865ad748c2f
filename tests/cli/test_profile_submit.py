"""`pipectl profile --submit`, on this machine and with a Slurm that only takes the script."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipectl.spec import load, profile_key

if TYPE_CHECKING:
    from conftest import Command

Program = Callable[[str, str], Path]
MODEL = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build(broken=False):
    if broken:
        raise RuntimeError("no weights here")
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def data():
    return TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
"""
PROFILE = Path("runs/tiny.profile.json")
LOCAL = ("--submit", "--scheduler", "local")


@pytest.fixture
def real_job(job: Path) -> Path:
    """The job with a model that trains."""
    Path("model.py").write_text(MODEL)
    return job


def only_run() -> Path:
    (found,) = Path("runs").glob("*-tiny-profile")
    return found


def test_the_profile_is_there_when_the_job_is_done(cli: Command, real_job: Path) -> None:
    result = cli("profile", "job.yaml", *LOCAL, "--wait", "--effort", "fast")
    run = only_run()
    assert result.code == 0, (run / "logs/job.log").read_text()
    first, second, *_, last = result.out.splitlines()
    assert first.startswith(f"submitted: {run.name} (local job ")
    assert second == f"see: pipectl status {run.name}"
    assert last == f"profile: {PROFILE}"
    assert json.loads(PROFILE.read_text())["key"] == profile_key(load(real_job))
    assert PROFILE.read_text() == (run / "profile.json").read_text()
    assert cli("plan", "job.yaml").err == ""


def test_status_shows_percent_and_the_profile(cli: Command, real_job: Path) -> None:
    found = json.loads(cli("profile", "job.yaml", *LOCAL, "--wait", "--json").out)
    assert (found["cached"], found["parameter_bytes"]) == (False, 232)
    run = only_run()
    shown = cli("status", run.name).out
    assert "  progress      100%\n" in shown
    assert f"  profile       {run}/profile.json\n" in shown
    assert "100%" in cli("status").out
    status = json.loads(cli("status", "last", "--json").out)
    assert (status["kind"], status["step"], status["steps"]) == ("profile", 100, 100)
    assert cli("status", "tiny").code == 6  # the name of the job means its training


def test_a_failure_has_the_exit_code_of_the_command(cli: Command, real_job: Path) -> None:
    broken = ("--set", "model.kwargs.broken=true")
    result = cli("profile", "job.yaml", *LOCAL, "--wait", *broken)
    assert result.code == 3
    assert "no weights here" in result.out
    assert not PROFILE.exists()


def test_the_job_has_one_node_with_all_its_tasks(
    cli: Command, real_job: Path, program: Program
) -> None:
    program("sbatch", "echo 77")
    settings = ("--set", "resources.tasks_per_node=3", "--effort", "thorough", "--again")
    found = json.loads(cli("profile", "job.yaml", "--submit", "--json", *settings).out)
    place = str(Path("runs/tiny.profile.json").absolute())
    assert (found["scheduler"], found["job_id"], found["file"]) == ("slurm", "77", place)
    script = (only_run() / "job.sh").read_text()
    assert "#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=3\n" in script
    launch = script.splitlines()[-2]
    assert f"-m pipectl.jobs.profile_in_job {found['directory']} --output {place} " in launch
    assert launch.endswith("--effort thorough --again")
    assert "mpiexec" not in script


@pytest.mark.parametrize("option", ["--again", "--links"])
def test_a_container_sees_where_the_result_goes(
    cli: Command, real_job: Path, program: Program, option: str
) -> None:
    program("sbatch", "echo 77")
    image = ("--set", "environment.container=docker://a/b", "--set", "resources.tasks_per_node=2")
    place = ("--scheduler", "slurm", "--submit", "--output", "far/away.json")
    result = cli("profile", "job.yaml", option, *place, *image)
    assert result.code == 0, result.err
    (script,) = Path("runs").glob("*/job.sh")
    launch = script.read_text().splitlines()[-2]
    for name in ("runs", "far"):
        assert f" --bind={Path(name).absolute()} " in launch


def test_a_template_that_extends_nothing_leaves_no_run(
    cli: Command, real_job: Path, program: Program
) -> None:
    program("sbatch", "echo 77")
    Path("template.sh").write_text("#!/bin/bash\n")
    for option in ("--submit", "--links"):
        template = ("--scheduler", "slurm", "--set", "launch.template=./template.sh")
        result = cli("profile", "job.yaml", option, *template)
        assert (result.code, "template.sh:1:1" in result.err) == (3, True), result.err
        assert [path for path in Path("runs").iterdir() if path.is_dir()] == []


def test_a_refused_submission_leaves_no_run(cli: Command, real_job: Path, program: Program) -> None:
    program("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    result = cli("profile", "job.yaml", "--submit")
    assert result.code == 5
    assert "slurm.partition" in result.err
    assert list(Path("runs").iterdir()) == []
