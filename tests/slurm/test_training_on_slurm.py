"""The main job on a real Slurm of four virtual nodes: profiled, planned and trained there."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.cli import main
from pipectl.runtime import checkpoint

JOB = Path(__file__).parents[2] / "configs" / "gpt-stdlib.yaml"
SMALL = [
    "training.steps=80",
    "training.batch_size=8",
    "model.kwargs.layers=2",
    "model.kwargs.width=64",
    "pipeline.micro_batches=4",
    "evaluation.data.kwargs.windows=16",
]
PROFILE = Path("runs/gpt-stdlib.profile.json")
pytestmark = pytest.mark.timeout(600)


def pipectl(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "pipectl", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def submit(folder: Path, scheduler: str, *settings: str) -> str:
    sets = [part for setting in [*SMALL, *settings] for part in ("--set", setting)]
    answer = pipectl(folder, "submit", str(JOB), "--scheduler", scheduler, *sets)
    return Path(answer["directory"]).name


def status(folder: Path, run: str) -> dict[str, Any]:
    """What the command says, which is asked often: in this process."""
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said):
        assert main(["status", run, "--json"]) == 0
    return json.loads(said.getvalue())  # type: ignore[no-any-return]


def watch(folder: Path, run: str, timeout_s: float = 400) -> list[dict[str, Any]]:
    """The status of a run, asked again and again until it is over."""
    seen = []
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        seen.append(status(folder, run))
        if seen[-1]["state"] not in ("QUEUED", "RUNNING", "COMPLETING"):
            return seen
        time.sleep(0.3)
    raise AssertionError(f"not over after {timeout_s} s: {seen[-1]}")


def weights(folder: Path, run: str) -> dict[str, torch.Tensor]:
    return checkpoint.load(max((folder / "runs" / run / "checkpoints").glob("step-*")))


@pytest.fixture(scope="session")
def local_run(tmp_path_factory: pytest.TempPathFactory, warm_commands: str) -> Path:
    """The same job, trained without a batch system on one rank; its profile is kept."""
    folder = tmp_path_factory.mktemp("local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm_commands)
        run = submit(folder, "local", "resources.nodes=1", "resources.tasks_per_node=1")
    assert watch(folder, run)[-1]["state"] == "COMPLETED"
    return folder / "runs" / run


@pytest.fixture(scope="session")
def local_weights(local_run: Path) -> dict[str, torch.Tensor]:
    return weights(local_run.parents[1], local_run.name)


def take_profile(local_run: Path, folder: Path) -> None:
    (folder / PROFILE).parent.mkdir()
    shutil.copy(local_run.parents[1] / PROFILE, folder / PROFILE)


def test_the_job_runs_on_virtual_nodes_and_gives_the_local_weights(
    lab: Path,
    tmp_path: Path,
    local_run: Path,
    local_weights: dict[str, torch.Tensor],
) -> None:
    take_profile(local_run, tmp_path)
    settings = ["resources.nodes=2", "resources.tasks_per_node=1"]
    stages = ["pipeline.stages=2", "slurm.options.begin=now+4"]
    run = submit(tmp_path, "slurm", *settings, *stages)
    seen = watch(tmp_path, run)
    states = list(dict.fromkeys(found["state"] for found in seen))
    assert states[0] == "QUEUED"
    assert "RUNNING" in states
    assert states[-1] == "COMPLETED", (tmp_path / "runs" / run / "logs" / "job.log").read_text()
    training = [s for s in seen if s["state"] == "RUNNING" and s["phase"] == "training"]
    assert any(found["step"] > 0 and found["last_loss"] for found in training)
    last = seen[-1]
    assert last["step"] == last["steps"] == 80
    assert last["last_loss"] < last["first_loss"]
    assert len({rank["node"] for rank in last["ranks"]}) == 2
    assert last["predicted_step_time_s"] > 0
    found = weights(tmp_path, run)
    assert found.keys() == local_weights.keys()
    assert all(torch.equal(found[name], local_weights[name]) for name in found)


@pytest.mark.usefixtures("warm")
def test_a_failing_model_fails_the_slurm_job_and_status_names_the_culprit(
    lab: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))\n"
        "class Data:\n"
        "    def __len__(self):\n"
        "        return 64\n"
        "    def __getitem__(self, index):\n"
        "        if index == 63:\n"
        "            raise RuntimeError('sample 63 is broken')\n"
        "        return torch.ones(4), 1\n"
    )
    (tmp_path / "job.yaml").write_text(
        "version: 1\n"
        "name: broken\n"
        "model: ./model.py:build\n"
        "loss: torch.nn:CrossEntropyLoss\n"
        "data: ./model.py:Data\n"
        "training: {steps: 40, batch_size: 8}\n"
        "pipeline: {stages: 2, micro_batches: 2}\n"
        "resources: {nodes: 2, tasks_per_node: 1}\n"
    )
    answer = pipectl(tmp_path, "submit", "job.yaml", "--scheduler", "slurm")
    run = Path(answer["directory"]).name
    last = watch(tmp_path, run)[-1]
    assert last["state"] == "FAILED"
    shown = subprocess.run(
        [sys.executable, "-m", "pipectl", "status", run],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "sample 63 is broken" in shown.stdout
    assert "rank 0" in shown.stdout or "rank 1" in shown.stdout


TO_SCRIPT = pytest.param("--batch", marks=pytest.mark.torture)


def start_training(folder: Path, local_run: Path, *settings: str) -> tuple[str, str]:
    """A run on two nodes that has made a step, and its job."""
    take_profile(local_run, folder)
    nodes = ["resources.nodes=2", "resources.tasks_per_node=1", "pipeline.stages=2"]
    run = submit(folder, "slurm", *nodes, *settings)
    deadline = time.monotonic() + 280
    while not (found := status(folder, run))["step"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return run, str(found["job_id"])


@pytest.mark.parametrize("whom", ["--verbose", TO_SCRIPT])
def test_a_signal_puts_the_job_back_into_the_queue_and_it_goes_on(
    lab: Path,
    tmp_path: Path,
    local_run: Path,
    local_weights: dict[str, torch.Tensor],
    whom: str,
) -> None:
    """To all steps; or to the script, as Slurm sends it before the walltime is over."""
    run, job_id = start_training(tmp_path, local_run)
    subprocess.run(["scancel", "--signal=USR2", whom, job_id], check=True)
    last = watch(tmp_path, run)[-1]
    log = (tmp_path / "runs" / run / "logs" / "job.log").read_text()
    assert (last["state"], last["step"]) == ("COMPLETED", 80), log
    metrics = (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["attempt"] for line in metrics} == {1, 2}
    found_weights = weights(tmp_path, run)
    assert all(torch.equal(found_weights[name], local_weights[name]) for name in local_weights)


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("mpiexec", ["--signal=TERM"]),
        pytest.param("srun", ["--signal=INT"], marks=pytest.mark.torture),
        pytest.param("srun", ["--signal=TERM", "--batch"], marks=pytest.mark.torture),
    ],
)
def test_a_signal_to_end_saves_and_stops_the_run_for_good(
    lab: Path, tmp_path: Path, local_run: Path, launcher: str, how: list[str]
) -> None:
    more = ["training.steps=1000000", f"launch.launcher={launcher}"]
    run, job_id = start_training(tmp_path, local_run, *more)
    subprocess.run(["scancel", *how, job_id], check=True)
    last = watch(tmp_path, run)[-1]
    directory = tmp_path / "runs" / run
    log = (directory / "logs" / "job.log").read_text()
    assert (last["state"], last["error"]) == ("PREEMPTED", None), log
    assert [path.name for path in (directory / "checkpoints").glob("step-*")]
