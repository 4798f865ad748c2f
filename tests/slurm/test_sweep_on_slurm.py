"""A sweep as a job array of a real Slurm; what its jobs would run on torch only waits."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_requests import wait_until

from pipectl.batch.slurm import SlurmScheduler

JOB = """\
version: 1
name: tiny
model: {factory: "torch.nn:Linear"}
loss: {factory: "torch.nn:MSELoss"}
data: {factory: "torch.utils.data:TensorDataset"}
training: {steps: 4, batch_size: 8}
checkpoint: {max_requeues: 0}
resources: {walltime: 5m}
sweep:
  grid: {training.seed: [11, 12, 13]}
  at_once: 2
site_defaults: false
"""
PYTHON = """\
#!/bin/bash
grep -o 'seed: .*' job.yaml
: >started
until [[ -e go ]]; do sleep 0.05; done
"""
Status = dict[str, Any]


@pytest.fixture
def sweep(pipectl, tmp_path, monkeypatch):
    """Commands in a directory with a job, whose Python is a script that waits."""
    for name, text in (("python", PYTHON), ("mpiexec", "#!/bin/bash\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def run(*arguments):
        found = pipectl(*arguments, "--json")
        return found["runs"] if isinstance(found, dict) else found  # type: ignore[no-any-return]

    return run


def until(sweep: Callable[..., list[Status]], *wanted: str) -> list[Status]:
    def found() -> list[Status]:
        runs = sweep("status", "tiny")
        return runs if [run["state"] for run in runs] == list(wanted) else []

    return wait_until(found, 120, 0.1)


def test_a_sweep_from_submission_to_its_end(pipectl, sweep):
    runs = sweep("submit", "job.yaml", "--scheduler", "slurm")
    first, second, third = (Path(run["directory"]) for run in runs)
    array, _, index = runs[0]["job_id"].partition("_")
    assert [run["job_id"] for run in runs] == [f"{array}_{i}" for i in range(3)], index

    found = until(sweep, "RUNNING", "RUNNING", "QUEUED")
    assert found[2]["reason"] == "JobArrayTaskLimit"
    assert SlurmScheduler().find(json.loads((first / "record.json").read_text())["tag"]) == array
    pipectl("cancel", second.name)
    until(sweep, "RUNNING", "CANCELLED", "RUNNING")
    (first / "go").touch()
    found = until(sweep, "COMPLETED", "CANCELLED", "RUNNING")
    assert found[0]["exit_code"] == 0
    wait_until((third / "started").exists)
    pipectl("cancel", "tiny")
    until(sweep, "COMPLETED", "CANCELLED", "CANCELLED")
    for run, seed in ((first, 11), (third, 13)):
        assert f"seed: {seed}\n" in (run / "logs/job.log").read_text()
