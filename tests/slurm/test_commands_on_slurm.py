"""The main job and a sweep on a real Slurm of four virtual nodes: profiled, planned and trained."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pipectl.batch.slurm import SlurmScheduler
from pipectl.cluster import Cluster
from pipectl.runs import RunDirectory, read_metrics, read_starts
from pipectl.runtime import checkpoint
from pipectl.spec import load, profile_key
from tests.batch.job_requests import wait_until

Pipectl = Callable[..., Any]
JOB = str(Path(__file__).parents[2] / "configs" / "gpt-stdlib.yaml")
LAB = Path(__file__).parents[2] / "slurm" / "lab"
SMALL = (
    "--set=training.batch_size=8",
    "--set=model.kwargs.layers=2",
    "--set=model.kwargs.width=64",
    "--set=pipeline.micro_batches=4",
    "--set=evaluation.data.kwargs.windows=16",
    "--set=training.steps=240",
)
ON_SLURM = ("--set=resources.nodes=2", "--set=resources.tasks_per_node=1", "--scheduler=slurm")
TO_PROFILE = (JOB, *SMALL, *ON_SLURM[:2], "--set=launch.scheduler=slurm")
LARGE = (*TO_PROFILE, "--set=model.kwargs.layers=6", "--set=pipeline.micro_batches=auto")
QUICKLY = ("--effort", "fast")
PROFILE = Path("runs/gpt-stdlib.profile.json")
pytestmark = pytest.mark.timeout(600)


def status_when(
    pipectl: Pipectl, run: str, holds: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """The status of a run, asked again and again until something holds of it."""

    def status() -> dict[str, Any]:
        found = pipectl("status", run, "--json")
        return found if holds(found) else {}

    return wait_until(status, 400, 0.3)


def is_over(status: dict[str, Any]) -> bool:
    return status["state"] not in ("QUEUED", "RUNNING", "COMPLETING")


def test_a_first_job_fits_the_lab(pipectl):
    pipectl("init", "first")
    spec = load(Path("first/job.yaml"), sites=())
    assert spec.slurm.partition == "debug"
    assert spec.resources.walltime <= 3600
    pipectl("check", "first/job.yaml")
    assert "to start at" in pipectl("submit", "first/job.yaml", "--test-only")


OF_SLEEPER = """\
name: sleeper
model: {factory: "torch.nn:Identity"}
loss: model
data: {factory: "torch.utils.data:TensorDataset"}
training: {steps: 1000, batch_size: 8}
pipeline: {micro_batches: 4}
site_defaults: false
launch: {scheduler: slurm}
"""


@pytest.fixture
def other_partitions(lab):
    """``small`` has node4 and jobs of 5 minutes, ``mine`` is for root only, ``old`` is down."""
    own = {"small": "MaxTime=5", "mine": "RootOnly=YES", "old": "State=DOWN"}
    for name, setting in own.items():
        words = ["scontrol", "create", f"PartitionName={name}", "Nodes=node4", setting]
        subprocess.run(words, check=True)
    yield
    for name in own:
        subprocess.run(["scontrol", "delete", f"PartitionName={name}"], check=True)


def write_sleeper() -> None:
    """A job and its profile."""
    Path("job.yaml").write_text(OF_SLEEPER)
    written = json.loads((Path(__file__).parents[1] / "cli" / "profile.json").read_text())
    Path("runs").mkdir()
    profile = {**written, "key": profile_key(load(Path("job.yaml")))}
    Path("runs/sleeper.profile.json").write_text(json.dumps(profile))


@pytest.mark.usefixtures("other_partitions")
def test_partitions_are_asked_when_a_job_would_start_there(pipectl):
    write_sleeper()
    three = ["sbatch", "--parsable", "-N3", "--exclusive", "-w", "node[1-3]", "-t", "2"]
    taking = [*three, "-o", "/dev/null", "--wrap", "sleep 100"]
    job_id = subprocess.run(taking, check=True, capture_output=True, text=True).stdout.strip()
    try:
        wait_until(lambda: SlurmScheduler().query([job_id])[job_id].deadline, 60, 0.1)
        ends_at = SlurmScheduler().query([job_id])[job_id].deadline
        found = pipectl("plan", "job.yaml", "--when", "--compare", "1,2", "--json")
        script = pipectl("submit", "job.yaml", "--soonest", "-N2", "--dry-run")
        chosen = pipectl("submit", "job.yaml", "--soonest", "--compare", "2", "--dry-run")
    finally:
        subprocess.run(["scancel", job_id], check=True)
    rows = {(row["queue"], row["nodes"]): row for row in found["rows"]}
    assert list(rows) == [("debug", 1), ("debug", 2), ("small", 1)]
    waits_s = [row["starts_at"] - found["asked_at"] for row in rows.values()]
    assert waits_s == pytest.approx([0, ends_at - found["asked_at"], 0], abs=1.5)
    assert [row["walltime_s"] for row in rows.values()] == [3600, 3600, 300]
    assert [row["requeues"] for row in rows.values()] == [0, 0, 2]
    assert rows["debug", 1]["cheapest"]
    assert found["left_out"].keys() == {"small", "mine", "old"}
    assert "#SBATCH --nodes=2" in script
    assert "#SBATCH --nodes=2" in chosen
    assert "--partition" not in script


@pytest.mark.usefixtures("other_partitions")
def test_a_job_would_start_beside_or_after_one_that_waits(pipectl):
    """The second job waits for three of the four nodes that the first one has for a minute."""
    write_sleeper()
    sleeps = ["sbatch", "--parsable", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 100"]
    commands = [[*sleeps, "-N4", "-t1"], [*sleeps, "-N3", "-t2"]]
    ids = [subprocess.run(each, check=True, capture_output=True, text=True) for each in commands]
    first, second = (done.stdout.strip() for done in ids)
    try:
        wait_until(lambda: SlurmScheduler().query([first])[first].deadline, 60, 0.1)
        ends_at = SlurmScheduler().query([first])[first].deadline
        nodes = ["squeue", "-h", "-j", second, "-o", "%Y"]
        wait_until(lambda: "node" in subprocess.check_output(nodes, text=True), 60, 0.1)
        found = pipectl("plan", "job.yaml", "--when", "--compare", "1,2,4", "--json")
    finally:
        subprocess.run(["scancel", first, second], check=True)
    starts = {(row["queue"], row["nodes"]): row["starts_at"] - ends_at for row in found["rows"]}
    assert list(starts) == [("debug", 1), ("debug", 2), ("debug", 4), ("small", 1)]
    assert list(starts.values()) == pytest.approx([0, 120, 120, 0], abs=1.5)


@pytest.mark.usefixtures("warm")
@pytest.mark.torture
def test_links_between_virtual_nodes_are_measured_in_a_job(pipectl, monkeypatch):
    monkeypatch.setattr("pipectl.jobs.measuring.LINKS_BUDGET_S", {"fast": 0.2})
    two_a_node = "--set=resources.tasks_per_node=2"
    said = pipectl("profile", *TO_PROFILE, two_a_node, "--links", "--wait", *QUICKLY)
    assert "cluster: runs/gpt-stdlib.cluster.json" in said
    cluster = Cluster.load(Path("runs/gpt-stdlib.cluster.json"))
    assert [(node.name, node.ranks) for node in cluster.nodes] == [("node1", 2), ("node2", 2)]
    assert cluster.assumptions == ()
    assert cluster.within_node.timings
    assert cluster.between_nodes.timings
    assert {ranks for ranks, *_ in cluster.allreduce} == {2, 4}
    status = pipectl("status", "last", "--json")
    assert (status["state"], status["scheduler"]) == ("COMPLETED", "slurm")
    assert "cluster.json" in pipectl("status", "last")


@pytest.mark.usefixtures("warm")
def test_within_a_job_a_model_is_measured_at_once(pipectl):
    inside = ["srun", "-n1", sys.executable, "-m", "pipectl", "profile", *TO_PROFILE, *QUICKLY]
    subprocess.run(inside, check=True, timeout=400)
    assert PROFILE.exists()


@pytest.mark.torture
@pytest.mark.usefixtures("warm")
def test_a_profile_measured_by_a_training_job_is_found(pipectl):
    dry_run = ("submit", *TO_PROFILE, "--set=training.steps=4", "--dry-run")
    assert "jobs.in_job" in pipectl(*dry_run)
    pipectl(*dry_run[:-1], "--wait")
    (run,) = Path("runs").glob("*-gpt-stdlib")
    assert PROFILE.read_text() == (run / "profile.json").read_text()
    assert "jobs.in_job" not in pipectl(*dry_run)


@pytest.mark.torture
@pytest.mark.usefixtures("warm")
def test_an_ended_profile_goes_on_in_the_next_job_and_is_found_on_the_login_node(pipectl, tmp_path):
    def kept() -> int:
        """Measurements in the journal."""
        journals = [json.loads(path.read_text()) for path in Path("runs/.cache").glob("*.journal")]
        return max((len(journal["entries"].keys() - {"graph"}) for journal in journals), default=0)

    submit = ("profile", *LARGE, *QUICKLY, "--json")
    run = pipectl(*submit)["run"]
    before = wait_until(kept, 280, 0.1)
    pipectl("cancel", run)
    assert status_when(pipectl, run, is_over)["state"] == "CANCELLED"
    assert not PROFILE.exists()
    found = pipectl(*submit, "--wait")
    assert found["resumed"] >= before
    assert kept() == 0
    assert (found["cached"], found["file"]) == (False, str(tmp_path / PROFILE))
    status = pipectl("status", "last", "--json")
    assert (status["state"], status["kind"]) == ("COMPLETED", "profile")
    measured = PROFILE.read_text()
    pipectl("plan", *LARGE)
    assert PROFILE.read_text() == measured


@pytest.fixture(scope="session")
def local_run(tmp_path_factory, warm_python):
    """The same job, trained without a batch system on one rank; its profile is kept."""
    folder = tmp_path_factory.mktemp("local")
    one = ["--set=resources.nodes=1", "--set=resources.tasks_per_node=1", "--scheduler=local"]
    for command in (["profile", *QUICKLY], ["submit", "--wait"]):
        words = [warm_python, "-m", "pipectl", *command, JOB, *SMALL, *one]
        subprocess.run(words, cwd=folder, check=True, timeout=400)
    (run,) = (folder / "runs").glob("*-gpt-stdlib")
    return run


@pytest.fixture
def lose_node(processes_on):
    """``lose_node(name)``: kill Slurm's daemon there and all that it has started; it comes back
    when the test has ended."""
    lost = list[psutil.Process]()

    def lose(node):
        here = processes_on(node)
        lost.extend(here)
        for process in here:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    yield lose
    psutil.wait_procs(lost, timeout=20)
    subprocess.run([LAB / "up"], capture_output=True, check=True, timeout=120)


def submit(pipectl: Pipectl, local_run: Path, *settings: str) -> Path:
    """Submit the job on two nodes with the profile of the local run."""
    PROFILE.parent.mkdir()
    shutil.copy(local_run.parents[1] / PROFILE, PROFILE)
    sets = [f"--set={setting}" for setting in ("pipeline.stages=2", *settings)]
    return Path(pipectl("submit", JOB, *SMALL, *ON_SLURM, *sets, "--json")["directory"])


def check_same(run: Path, local_run: Path) -> None:
    """Weights, and the losses of all steps."""
    expected, trained = (
        checkpoint.load(max((each / "checkpoints").glob("step-*"))) for each in (local_run, run)
    )
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[name], expected[name]) for name in trained)
    first, second = (
        {line.step: line.loss for line in read_metrics(RunDirectory(each)) if line.is_step}
        for each in (local_run, run)
    )
    assert first == second
    assert [*first] == [*range(1, 241)]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "what",
    [
        "scancel --signal=USR2 --verbose",
        pytest.param("scancel --signal=USR2 --batch", marks=pytest.mark.torture),
        pytest.param("scontrol requeue", marks=pytest.mark.torture),
        pytest.param("node", marks=pytest.mark.torture),
    ],
)
def test_a_job_on_two_nodes_is_put_back_into_the_queue_and_gives_the_local_weights(
    pipectl, lose_node, local_run, what
):
    """By a signal to all steps; to the script, as Slurm sends it before the walltime is over; by
    hand; and as it has lost a node, whoever notices first: Slurm, the launcher or the watcher."""
    run = submit(pipectl, local_run, "slurm.options.begin=now+4", "checkpoint.every=5")
    assert pipectl("status", run.name, "--json")["state"] == "QUEUED"
    found = status_when(pipectl, run.name, itemgetter("step"))
    assert found["state"] == "RUNNING"
    assert found["phase"].partition(" ")[0] in ("training", "saving")
    assert found["last_loss"]
    if what == "node":
        lose_node(found["ranks"][1]["node"])
    else:
        subprocess.run([*what.split(), str(found["job_id"])], check=True)
    last = status_when(pipectl, run.name, is_over)
    assert last["state"] == "COMPLETED", (run / "logs" / "job.log").read_text()
    assert last["step"] == last["steps"] == 240
    assert last["last_loss"] < last["first_loss"]
    assert len({rank["node"] for rank in last["ranks"]}) == 2
    assert last["predicted_step_time_s"] > 0
    first, *_, newest = (line.attempt for line in read_metrics(RunDirectory(run)))
    assert newest == 2
    assert first == 1 or "USR2" not in what  # there was time to save
    check_same(run, local_run)


@pytest.mark.usefixtures("warm")
@pytest.mark.torture
@pytest.mark.parametrize("keeps", [True, False])
def test_a_job_with_a_range_of_nodes_goes_on_with_those_that_are_left(
    pipectl, lose_node, local_run, keeps
):
    """In the same allocation, if Slurm leaves it that; else in the next one, for which Slurm puts
    it into the queue, or it does so itself."""
    keep = ["slurm.options.no-kill=true"] if keeps else []
    settings = ("resources.nodes=2-4", "pipeline.stages=auto", "checkpoint.every=5", *keep)
    run = submit(pipectl, local_run, *settings)
    for nodes in (4, 3):
        found = status_when(
            pipectl, run.name, lambda now, n=nodes: now["step"] and len(now["ranks"]) == n
        )
        lose_node(found["ranks"][-1]["node"])
    last = status_when(pipectl, run.name, is_over)
    log = (run / "logs/job.log").read_text()
    assert last["state"] == "COMPLETED", log
    assert len({rank["node"] for rank in last["ranks"]}) == 2
    assert log.count("the job goes on with") == (2 if keeps else 0)
    assert read_starts(RunDirectory(run)) == 3
    check_same(run, local_run)


@pytest.mark.usefixtures("warm")
@pytest.mark.torture
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("seed", range(int(os.environ.get("PIPECTL_LOSSES", "2")) // 2))
def test_nodes_that_are_lost_at_random_cost_the_steps_since_the_last_checkpoint(
    pipectl, lose_node, local_run, seed
):
    """Two of four nodes, one after the other. PIPECTL_LOSSES says how many in all."""
    draw = random.Random(seed)
    settings = ("resources.nodes=2-4", "pipeline.stages=auto", "checkpoint.every=5")
    run = submit(pipectl, local_run, *settings, "slurm.options.no-kill=true")
    saved = list[int]()
    for nodes, step in ((4, draw.randrange(1, 110)), (3, draw.randrange(110, 200))):
        found = status_when(
            pipectl,
            run.name,
            lambda now, n=nodes, at=step: (now["step"] or 0) >= at and len(now["ranks"]) == n,
        )
        node = found["ranks"][draw.randrange(1, nodes)]["node"]
        saved.append(max((step_of(path) for path in run.glob("checkpoints/step-*")), default=0))
        lose_node(node)
    last = status_when(pipectl, run.name, is_over)
    assert last["state"] == "COMPLETED", (run / "logs/job.log").read_text()
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    starts = dict[int, list[int]]()
    for line in lines:
        if "loss" in line:
            starts.setdefault(line["attempt"], []).append(line["step"])
    assert [*starts] == [1, 2, 3]
    assert starts[2][0] > saved[0]
    assert starts[3][0] > saved[1]
    check_same(run, local_run)


def step_of(checkpoint_directory: Path) -> int:
    return int(checkpoint_directory.name.partition("-")[2])


@pytest.mark.usefixtures("warm", "partitions_with_priorities")
@pytest.mark.torture
def test_a_job_with_a_range_of_nodes_that_is_preempted_goes_on_with_those_that_are_free(
    pipectl, local_run
):
    """It saves a checkpoint in its time of grace: no step is computed again."""
    settings = ("resources.nodes=2-4", "pipeline.stages=auto", "slurm.partition=low")
    run = submit(pipectl, local_run, *settings)
    status_when(pipectl, run.name, lambda now: now["step"] and len(now["ranks"]) == 4)
    taking = ("-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 300")
    urgent = subprocess.run(["sbatch", "--parsable", *taking], capture_output=True, text=True)
    try:
        last = status_when(pipectl, run.name, is_over)
    finally:
        subprocess.run(["scancel", urgent.stdout.strip()], check=True)
    assert last["state"] == "COMPLETED", (run / "logs/job.log").read_text()
    assert len({rank["node"] for rank in last["ranks"]}) == 2
    attempts = [line.attempt for line in read_metrics(RunDirectory(run)) if line.is_step]
    assert sorted(set(attempts)) == [1, 2]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [line["step"] for line in map(json.loads, lines) if "loss" in line]
    assert steps == [*range(1, 241)]
    check_same(run, local_run)


@pytest.mark.usefixtures("warm")
@pytest.mark.torture
@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("mpiexec", ["--signal=TERM"]),
        ("srun", ["--signal=INT"]),
        ("srun", ["--signal=TERM", "--batch"]),
    ],
)
def test_a_signal_to_end_saves_and_stops_the_run_until_it_is_resumed(
    pipectl, local_run, launcher, how
):
    run = submit(pipectl, local_run, f"launch.launcher={launcher}")
    job_id = status_when(pipectl, run.name, itemgetter("step"))["job_id"]
    subprocess.run(["scancel", *how, str(job_id)], check=True)
    last = status_when(pipectl, run.name, is_over)
    assert (last["state"], last["error"]) == ("PREEMPTED", None), (run / "logs/job.log").read_text()
    assert [path.name for path in (run / "checkpoints").glob("step-*")]
    pipectl("resume", run.name, "--set=resources.nodes=3", "--set=pipeline.stages=3")
    assert status_when(pipectl, run.name, is_over)["state"] == "COMPLETED"
    check_same(run, local_run)


@pytest.fixture
def shell_of_salloc(pipectl, monkeypatch):
    """The variables of a shell that has two nodes for one rank each, and ten minutes."""
    shell = "env -0 >shell.part && mv shell.part shell; until [[ -e over ]]; do sleep 0.1; done"
    size = ("-N2", "--ntasks-per-node=1", "-t", "10")
    with subprocess.Popen(["salloc", *size, "bash", "-c", shell], stderr=subprocess.PIPE):
        wait_until(Path("shell").exists)
        for entry in Path("shell").read_text().split("\0"):
            if entry.startswith("SLURM_"):
                monkeypatch.setenv(*entry.split("=", 1))
        yield
        Path("over").touch()


@pytest.mark.torture
@pytest.mark.usefixtures("warm", "shell_of_salloc")
def test_a_run_in_an_allocation_is_cancelled_and_resumed_from_its_shell(
    pipectl, local_run, monkeypatch
):
    PROFILE.parent.mkdir()
    shutil.copy(local_run.parents[1] / PROFILE, PROFILE)
    job = (JOB, *SMALL, "--set=resources.nodes=null", "--set=resources.tasks_per_node=null")
    assert " on 2 ranks" in pipectl("plan", *job, "--scheduler=here")
    wrong = (*job, "--set=resources.nodes=3", "--scheduler=here")
    assert "this allocation (" in pipectl("submit", *wrong, code=3)
    two = ("doctor", "--submit", "--scheduler=here", "--json")
    found = pipectl(*two)
    assert [(each["what"], each["level"]) for each in found] == [
        ("mpi", "ok"), ("network", "ok"), ("shared files", "ok"),
    ]  # fmt: skip
    assert "node1 to node2" in found[1]["text"]
    alone = ("--set=launch.launcher=srun", "--set=launch.mpi=none", "--set=resources.nodes=2")
    (found,) = pipectl(*two, *job, *alone, code=1)
    assert (found["what"], found["level"]) == ("mpi", "fail")
    assert "each sees 1" in found["text"]
    said = pipectl("submit", *job, "--set=checkpoint.every=20", "--scheduler=here", "--json")
    run = Path(said["directory"])
    found = status_when(pipectl, run.name, itemgetter("step"))
    assert (found["scheduler"], found["state"]) == ("here", "RUNNING")
    assert len({rank["node"] for rank in found["ranks"]}) == 2
    assert 60 < json.loads((run / "record.json").read_text())["walltime_s"] <= 600
    pipectl("cancel", run.name)
    assert pipectl("status", run.name, "--json")["state"] == "CANCELLED"
    steps = ["squeue", "--steps", "--noheader", "--format=%i"]
    assert subprocess.check_output(steps, text=True).split() == []
    pipectl("resume", run.name)
    assert status_when(pipectl, run.name, is_over)["state"] == "COMPLETED"
    check_same(run, local_run)
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name)
    assert "in no allocation" in pipectl("submit", *job, "--scheduler=here", code=5)


SWEEP = """\
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
WAITS = """\
#!/bin/bash
grep -o 'seed: .*' job.yaml
: >started
until [[ -e go ]]; do sleep 0.05; done
"""


def test_a_sweep_is_a_job_array_from_submission_to_its_end(pipectl, tmp_path, monkeypatch):
    """What its jobs would run on torch only waits."""
    starts = '#!/bin/bash\nrm -f "$PIPECTL_START/starting"\n'
    for name, text in (("python", WAITS), ("mpiexec", starts)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.yaml").write_text(SWEEP)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def until(*wanted: str) -> list[dict[str, Any]]:
        def found() -> list[dict[str, Any]]:
            runs = pipectl("status", "tiny", "--json")["runs"]
            return runs if [run["state"] for run in runs] == [*wanted] else []

        return wait_until(found, pause_s=0.1)

    runs = pipectl("submit", "job.yaml", "--scheduler", "slurm", "--json")
    first, second, third = (Path(run["directory"]) for run in runs)
    array = runs[0]["job_id"].partition("_")[0]
    assert [run["job_id"] for run in runs] == [f"{array}_{i}" for i in range(3)]
    assert until("RUNNING", "RUNNING", "QUEUED")[2]["reason"] == "JobArrayTaskLimit"
    assert SlurmScheduler().find(json.loads((first / "record.json").read_text())["tag"]) == array
    pipectl("cancel", second.name)
    until("RUNNING", "CANCELLED", "RUNNING")
    (first / "go").touch()
    assert until("COMPLETED", "CANCELLED", "RUNNING")[0]["exit_code"] == 0
    wait_until((third / "started").exists)
    pipectl("cancel", "tiny")
    until("COMPLETED", "CANCELLED", "CANCELLED")
    for run, seed in ((first, 11), (third, 13)):
        assert f"seed: {seed}\n" in (run / "logs/job.log").read_text()


CODE = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset


def build():
    return nn.Linear(4, 1)


def data():
    x = torch.rand(16, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loss(outputs, targets):
    return ((outputs - targets) ** 2).mean()
"""
EDITED = """\
version: 1
name: edited
model: ./model.py:build
loss: ./model.py:loss
data: ./model.py:data
training: {steps: 2, batch_size: 16}
pipeline: {stages: 1, micro_batches: 2}
resources: {walltime: 5m}
slurm: {options: {hold: true}}
environment: {setup: ["touch start-$SLURM_RESTART_COUNT", "until [[ -e go ]]; do sleep 0.1; done"]}
site_defaults: false
"""


@pytest.mark.torture
@pytest.mark.usefixtures("warm")
def test_a_job_edited_while_it_is_held_trains_the_code_it_was_submitted_with_also_when_requeued(
    pipectl, tmp_path
):
    model = tmp_path / "model.py"
    model.write_text(CODE)
    Path("job.yaml").write_text(EDITED)
    run = Path(pipectl("submit", "job.yaml", "--scheduler=slurm", "--json")["directory"])
    job_id = str(pipectl("status", run.name, "--json")["job_id"])
    model.write_text(CODE.replace(".mean()", ".mean() * 1e6"))
    assert pipectl("status", run.name, "--json")["changed_files"] == [str(model)]
    subprocess.run(["scontrol", "release", job_id], check=True)
    wait_until(lambda: [*run.glob("start-*")])
    subprocess.run(["scontrol", "requeue", job_id], check=True)
    wait_until((run / "start-1").exists)
    (run / "go").touch()
    last = status_when(pipectl, run.name, is_over)
    log = (run / "logs/job.log").read_text()
    assert last["state"] == "COMPLETED", log
    assert last["last_loss"] < 1e3
    assert f"{model} has changed since the submission; the job uses its copy" in log
