"""Profiling in an allocation of a real Slurm, and what is left of it for the login node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).parents[2] / "configs" / "gpt-stdlib.yaml"
SMALL = (
    "--set=training.steps=4",
    "--set=training.batch_size=8",
    "--set=model.kwargs.layers=2",
    "--set=model.kwargs.width=64",
    "--set=pipeline.micro_batches=4",
    "--set=evaluation=null",
    "--set=resources.nodes=2",
    "--set=resources.tasks_per_node=1",
    "--set=launch.scheduler=slurm",
)
LARGE = (*SMALL, "--set=model.kwargs.layers=12", "--set=pipeline.micro_batches=auto")
PROFILE = Path("runs/gpt-stdlib.profile.json")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def login(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on a login node."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("SLURM") and name != "SLURM_CONF":
            monkeypatch.delenv(name)
    return tmp_path


def pipectl(*arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "pipectl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


def answer(*arguments: str) -> dict[str, Any]:
    done = pipectl(*arguments, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_login_node_is_refused_and_an_allocation_is_not(login: Path) -> None:
    refused = pipectl("profile", str(JOB), *SMALL)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--submit" in refused.stderr
    inside = pipectl("profile", str(JOB), *SMALL, "--effort", "fast", before=("srun", "-n1"))
    assert inside.returncode == 0, inside.stderr
    assert PROFILE.exists()


def test_a_submitted_profile_is_found_on_the_login_node(login: Path) -> None:
    found = answer("profile", str(JOB), *SMALL, "--submit", "--wait")
    assert (found["cached"], found["file"]) == (False, str(login / PROFILE))
    status = answer("status", "last")
    assert (status["state"], status["kind"], status["scheduler"]) == (
        *("COMPLETED", "profile"),
        "slurm",
    )
    plan = pipectl("plan", str(JOB), *SMALL)
    assert (plan.returncode, plan.stderr) == (0, "")


@pytest.mark.usefixtures("warm")
def test_a_profile_measured_by_a_training_job_is_found_too(login: Path) -> None:
    first = pipectl("submit", str(JOB), *SMALL, "--wait")
    assert first.returncode == 0, first.stderr + first.stdout
    assert "no fresh profile" in first.stderr
    (run,) = Path("runs").glob("*-gpt-stdlib")
    assert PROFILE.read_text() == (run / "profile.json").read_text()
    second = pipectl("submit", str(JOB), *SMALL, "--json")
    assert second.returncode == 0, second.stderr
    assert "no fresh profile" not in second.stderr
    assert pipectl("cancel", json.loads(second.stdout)["run"]).returncode == 0


def test_an_ended_job_goes_on_in_the_next(login: Path) -> None:
    run = answer("profile", str(JOB), *LARGE, "--submit")["run"]
    deadline = time.monotonic() + 280
    while (kept := _kept()) < 1:
        assert time.monotonic() < deadline, answer("status", run)
        time.sleep(0.1)
    assert pipectl("cancel", run).returncode == 0
    while answer("status", run)["state"] != "CANCELLED":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert not PROFILE.exists()
    found = answer("profile", str(JOB), *LARGE, "--submit", "--wait")
    assert found["resumed"] >= kept
    assert PROFILE.exists()
    assert _kept() == 0


def _kept() -> int:
    """Lines of the journal behind its header and the graph's."""
    lines = [path.read_text().count("\n") - 2 for path in Path("runs/.cache").glob("*.journal")]
    return max(0, *lines, 0)
