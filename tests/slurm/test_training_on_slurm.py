"""The main job on a real Slurm of four virtual nodes: profiled, planned and trained there."""

import json
import shutil
import subprocess
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from job_requests import wait_until

from pipectl.runtime import checkpoint

Pipectl = Callable[..., Any]
JOB = str(Path(__file__).parents[2] / "configs" / "gpt-stdlib.yaml")
SMALL = [
    "--set=training.steps=240",
    "--set=training.batch_size=8",
    "--set=model.kwargs.layers=2",
    "--set=model.kwargs.width=64",
    "--set=pipeline.micro_batches=4",
    "--set=evaluation.data.kwargs.windows=16",
]
TWO_NODES = ["--set=resources.nodes=2", "--set=resources.tasks_per_node=1"]
PROFILE = Path("runs/gpt-stdlib.profile.json")
pytestmark = pytest.mark.timeout(600)


def status_when(
    pipectl: Pipectl, run: Path, holds: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """The status of a run, asked again and again until something holds of it."""

    def status() -> dict[str, Any]:
        found = pipectl("status", run.name, "--json")
        return found if holds(found) else {}

    return wait_until(status, 400, 0.3)


def is_over(status: dict[str, Any]) -> bool:
    return status["state"] not in ("QUEUED", "RUNNING", "COMPLETING")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(max((run / "checkpoints").glob("step-*")))


@pytest.fixture(scope="session")
def local_run(tmp_path_factory, warm_commands):
    """The same job, trained without a batch system on one rank; its profile is kept."""
    folder = tmp_path_factory.mktemp("local")
    one = ["--set=resources.nodes=1", "--set=resources.tasks_per_node=1", "--scheduler=local"]
    for command in (["profile", "--effort=fast"], ["submit", "--wait"]):
        words = [warm_commands, "-m", "pipectl", *command, JOB, *SMALL, *one]
        subprocess.run(words, cwd=folder, check=True, timeout=400)
    (run,) = (folder / "runs").glob("*-gpt-stdlib")
    return run


def submit(pipectl: Pipectl, local_run: Path, *settings: str) -> Path:
    """Submit the job on two nodes with the profile of the local run."""
    PROFILE.parent.mkdir()
    shutil.copy(local_run.parents[1] / PROFILE, PROFILE)
    sets = [f"--set={setting}" for setting in ("pipeline.stages=2", *settings)]
    words = [*SMALL, *TWO_NODES, *sets, "--scheduler=slurm", "--json"]
    return Path(pipectl("submit", JOB, *words)["directory"])


@pytest.mark.usefixtures("warm")
def test_a_failing_model_fails_the_slurm_job_and_status_names_the_culprit(pipectl, tmp_path):
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
    run = Path(pipectl("submit", "job.yaml", "--scheduler=slurm", "--json")["directory"])
    assert status_when(pipectl, run, is_over)["state"] == "FAILED"
    shown = pipectl("status", run.name)
    assert "sample 63 is broken" in shown
    assert "rank 0" in shown or "rank 1" in shown


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("whom", ["--verbose", pytest.param("--batch", marks=pytest.mark.torture)])
def test_a_job_on_two_nodes_is_requeued_by_a_signal_and_gives_the_local_weights(
    pipectl, local_run, whom
):
    """To all steps; or to the script, as Slurm sends it before the walltime is over."""
    run = submit(pipectl, local_run, "slurm.options.begin=now+4")
    assert pipectl("status", run.name, "--json")["state"] == "QUEUED"
    found = status_when(pipectl, run, itemgetter("step"))
    assert (found["state"], found["phase"]) == ("RUNNING", "training")
    assert found["last_loss"]
    subprocess.run(["scancel", "--signal=USR2", whom, str(found["job_id"])], check=True)
    last = status_when(pipectl, run, is_over)
    assert last["state"] == "COMPLETED", (run / "logs" / "job.log").read_text()
    assert last["step"] == last["steps"] == 240
    assert last["last_loss"] < last["first_loss"]
    assert len({rank["node"] for rank in last["ranks"]}) == 2
    assert last["predicted_step_time_s"] > 0
    metrics = (run / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["attempt"] for line in metrics} == {1, 2}
    expected, trained = weights(local_run), weights(run)
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[name], expected[name]) for name in trained)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("mpiexec", ["--signal=TERM"]),
        pytest.param("srun", ["--signal=INT"], marks=pytest.mark.torture),
        pytest.param("srun", ["--signal=TERM", "--batch"], marks=pytest.mark.torture),
    ],
)
def test_a_signal_to_end_saves_and_stops_the_run_for_good(pipectl, local_run, launcher, how):
    more = ["training.steps=1000000", f"launch.launcher={launcher}"]
    run = submit(pipectl, local_run, *more)
    job_id = status_when(pipectl, run, itemgetter("step"))["job_id"]
    subprocess.run(["scancel", *how, str(job_id)], check=True)
    last = status_when(pipectl, run, is_over)
    assert (last["state"], last["error"]) == ("PREEMPTED", None), (run / "logs/job.log").read_text()
    assert [path.name for path in (run / "checkpoints").glob("step-*")]
