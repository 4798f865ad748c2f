"""Running commands in this process, in an empty directory, without the machine's own settings."""

import io
import json
import math
import re
import shutil
import socket
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipectl.cli import main, progress
from pipectl.cluster import Cluster, Device, Node, assumed_cluster
from pipectl.faults import ErrorReport
from pipectl.jobs.planning import write_plan
from pipectl.link import Link
from pipectl.runs import Record, RunDirectory
from pipectl.simulate import simulate
from pipectl.spec import load, profile_key
from pipectl.timeline import Timeline

HERE = Path(__file__).parent
GOLDEN, MODELS, PROFILE = HERE / "golden", HERE / "models_of_jobs.py", HERE / "profile.json"
JOB = """\
version: 1
name: tiny
model: {factory: "./model.py:build"}
loss: {factory: "torch.nn:MSELoss"}
data: {factory: "./model.py:data"}
training: {steps: 4, batch_size: 8}
pipeline: {stages: 2, micro_batches: 4, schedule: 1f1b}
resources: {nodes: 2, tasks_per_node: 1}
site_defaults: false
"""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document that the command has printed."""
        assert self.out, self.err
        return json.loads(self.out)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty current directory, and no Slurm: only the basic commands are on PATH."""
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "rm", "mv", "mkdir", "cat", "sleep"):
        (programs / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("PIPECTL_DEBUG", "FORCE_COLOR", "SLURM_CONF"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def cli(place, capfd, monkeypatch):
    """``cli("status", "last")`` runs that command; on a slow machine, too, it prints the same."""
    monkeypatch.setattr(progress, "LINE_S", math.inf)

    def run(*arguments):
        capfd.readouterr()
        code = main(list(arguments))
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def screen(monkeypatch):
    """``screen(80, "progress.errors")``: what a terminal of 80 columns is sent in its place."""

    def show(width, *consoles):
        text = io.StringIO()
        terminal = Console(
            file=text, force_terminal=True, width=width, height=30, color_system=None
        )
        for path in consoles:
            module, name = f"pipectl.cli.{path}".rsplit(".", 1)
            monkeypatch.setattr(import_module(module), name, lambda: terminal)
        return text

    return show


FIGURE = re.compile(r"\d\S* (h \d\d min|min \d\d s|days|ms|us|s)\b|\d\S*(?= node-hours)")
"""A time, or what was used, in `status`."""


@pytest.fixture
def settled(place, time_in_names):
    """``settled(text)`` has no dates, host, ids of processes, nor this directory.

    Nor does it have what the regular expression ``vary`` finds.
    """
    here = rf"\b{re.escape(socket.gethostname())}\b"

    def settle(text, vary="(?!)"):
        text = text.replace(f"{place}/", "")
        for pattern in (r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", r"\d+\.\d+@\S+", here, vary):
            text = re.sub(pattern, "***", text)
        for line in re.findall(r"^  (?:time|used)  .*", text, re.MULTILINE):
            text = text.replace(line, FIGURE.sub("***", line))
        text = re.sub(r"(?<= done )([A-Z]\w\w )?\d\d:\d\d\b", "HH:MM", text)
        text = re.sub(r"(?<=NOW-tiny )[0-9a-f]{8}\b", "***", time_in_names.sub("NOW-", text))
        return "".join(f"{line.rstrip()}\n" for line in text.splitlines())

    return settle


@pytest.fixture
def time_in_names():
    """A regular expression: the time in the name of a run that a command has made."""
    return re.compile(r"\b(?!2025)\d{8}-\d{6}-")


@pytest.fixture
def golden(request, settled, snapshot):
    """``golden(text)`` compares with the file of the test's name; ``make golden`` accepts changes.

    What varies is left out, see ``settled``.
    """
    file = GOLDEN / f"{request.node.name}.txt"
    return lambda *texts, vary="(?!)": snapshot(file, settled("\n".join(texts), vary))


@pytest.fixture
def program(place):
    """``program("sbatch", "echo 7")`` puts a bash script of that name on PATH."""

    def write(name, text):
        path = place / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def slurm(program):
    """Slurm takes every job as number 41, and lists none."""
    program("sbatch", "echo 41")
    program("squeue", "exit 0")
    program("sacct", "exit 1")
    return program


@pytest.fixture
def mpiexec(place, program, monkeypatch):
    """``mpiexec("exit 9")`` pretends to be the mpiexec beside the interpreter."""
    (place / "bin/python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(place / "bin/python"))
    return lambda text: program("mpiexec", text)


@pytest.fixture
def job(place):
    """A valid job spec, ``job.yaml``."""
    (place / "model.py").write_text("def build(): ...\ndef data(): ...\n")
    (place / "job.yaml").write_text(JOB)
    return Path("job.yaml")


def write_profile(path: Path, key: str | None = None) -> Path:
    """A chain of four operators, each with 1 MiB of parameters, as a profiler would write it."""
    document = json.loads(PROFILE.read_text())
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**document, "key": key} if key else document))
    return path


@pytest.fixture
def profile(job):
    """A fresh profile of the job at its usual place."""
    return write_profile(Path("runs/tiny.profile.json"), profile_key(load(job)))


@pytest.fixture
def alone(place):
    """A profile without a job file beside it."""
    return write_profile(Path("p.json"))


@pytest.fixture
def clusters(place):
    """Four ranks in ``c.json``, two with 60 B in ``small.json``, two far apart in ``slow.json``."""
    assumed_cluster("mine", [2, 2], 2, None).save(Path("c.json"))
    assumed_cluster("small", [2], 2, 60).save(Path("small.json"))
    slow = assumed_cluster("slow", [1, 1], 1, None)
    replace(slow, between_nodes=Link(0.01, 1e6), assumed=False).save(Path("slow.json"))


@pytest.fixture
def only_run(place):
    """The directory of the one run that there is."""

    def find():
        (path,) = (path for path in Path("runs").glob("2*") if path.is_dir())
        return path

    return find


@pytest.fixture
def run_of(place):
    """``run_of("20250101-120000-tiny", scheduler="pbs")`` makes a run whose process is gone."""

    def write(name, **record):
        run = RunDirectory(place / "runs" / name)
        for folder in (run.start.errors, run.logs, run.trace, run.checkpoints):
            folder.mkdir(parents=True)
        gone = f"{2**22 - 1}.1@{socket.gethostname()}"
        usual = {"scheduler": "local", "job_id": gone, "ranks": 2, "nodes": 1, "steps": 10}
        fields = {**usual, **record}
        Record("tiny", tag="t", submitted_at=1.7e9, state="submitted", **fields).save(run.record)
        return run.path

    return write


@pytest.fixture
def queued(run_of):
    """A run that Slurm has as job 12."""
    return run_of("20250103-120000-tiny", scheduler="slurm", job_id="12")


@pytest.fixture
def gone(run_of):
    """A run whose process has ended without a word."""
    return run_of("20250103-120000-tiny")


def write_metrics(run: Path, steps: int, **more: Any) -> None:
    """0.5 s a step after three slow ones, the loss falling from 3."""
    lines: list[dict[str, Any]] = [
        {"step": step, "steps": 10, "loss": 3.0 / step, "step_time_s": 5.0 if step < 4 else 0.5}
        for step in range(1, steps + 1)
    ]
    lines = [{**line, "time": 1.7e9, "samples_per_s": 16.0} for line in lines]
    lines += [{"step": steps, "time": 0, **more}] if more else []
    text = "".join(json.dumps({"attempt": 1, **line}) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text)


@pytest.fixture
def finished(run_of):
    """A completed run with metrics, logs and an evaluation."""
    run = run_of("20250101-120000-tiny")
    (run / "starts/1/exit_code").write_text("0\n")
    write_metrics(run, 10, evaluation={"loss": 0.25})
    (run / "logs/job.log").write_text("started\nzero \x1b[31mred\n")
    return run


@pytest.fixture
def failed(run_of):
    """A run that rank 1 broke at step 5, then rank 0."""
    run = run_of("20250102-120000-tiny")
    (run / "starts/1/exit_code").write_text("9\n")
    write_metrics(run, 4)
    for rank, time in ((0, 20.0), (1, 10.0)):
        doing = {"stage": rank, "step": 5, "action": "BACKWARD micro-batch 2", "host": "n1"}
        error = ErrorReport(f"boom {rank}", rank, **doing, type="ValueError", time=time)
        error.save(run / f"starts/1/errors/rank-{rank:04d}.json")
    return run


@pytest.fixture
def ended(cli, profile, slurm, only_run):
    """A run on Slurm that failed after its checkpoint of step 2."""
    assert cli("submit", "job.yaml", "--scheduler", "slurm").code == 0
    for name, text in (("begun", ""), ("exit_code", "1\n")):
        (only_run() / "starts/1" / name).write_text(text)
    (only_run() / "checkpoints/step-000002").mkdir()
    slurm("sbatch", "echo 42")


@pytest.fixture
def sweep(profile):
    """The job gets a sweep of four points, and has a fresh profile."""
    grid = "{optimizer.kwargs.lr: [0.1, 0.01], training.seed: [0, 1]}"
    with Path("job.yaml").open("a") as job:
        job.write(f"sweep: {{grid: {grid}, at_once: 2}}\n")


@pytest.fixture
def submitted_sweep(cli, sweep, slurm):
    """That sweep waits in Slurm's queue as job 35."""
    slurm("sbatch", "echo 35")
    slurm("squeue", "echo '35_[0-3%2]|PENDING|1|N/A|N/A||t|None'")
    slurm("scancel", 'echo "$@" >>scancel.argv')
    assert cli("submit", "job.yaml", "--scheduler", "slurm").code == 0


@pytest.fixture
def real_job(job):
    """The job with a model that trains."""
    shutil.copy(MODELS, "model.py")
    return job


@pytest.fixture
def recorded(finished, pipeline):
    """A completed run with a plan and what its ranks hold, of which steps 5 and 10 are recorded.

    In step 10, stage 1 took twice its time.
    """
    run, free = RunDirectory(finished), Link(0.0, 1e15)
    plan, cluster = pipeline(2, 4), Cluster("c", "t", (Node("n", 2, 2, Device("cpu")),), free, free)
    write_plan(run, plan, cluster)
    timeline = simulate(plan, cluster).timeline
    Timeline(timeline.events, 2, 5).save(run.measured_of(5))
    slower = [
        event._replace(end_s=2 * event.end_s - event.start_s) if event.stage == 1 else event
        for event in timeline.events
        if event.rank == 1 or event.micro_batch != 3
    ]
    Timeline(tuple(slower), 2, 10, 2e-5).save(run.measured_of(10))
    Timeline(timeline.events, 4, 12).save(run.path / "of-four-ranks.json")
    ranks = [{"rank": rank, "peak_bytes": 1 << 30} for rank in range(2)]
    beat = {"version": 1, "state": "training", "step": 10, "steps": 10, "ranks": ranks}
    run.start.heartbeat.write_text(json.dumps(beat))
    return run
