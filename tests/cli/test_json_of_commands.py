"""Every command with ``--json`` has the top-level keys that docs/json.md says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from formats import documented_keys
from mpi4py import MPI
from pages import CHECKOUT, anchor_of, commands_of
from typer.main import get_command

from pipectl.cli import app
from pipectl.cli.commands.doctor import Finding
from pipectl.cluster import Cluster, assumed_cluster
from pipectl.jobs.planning import write_plan
from pipectl.jobs.verify import Reference, describe
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.runtime.checkpoint import Keep, Saver, take_snapshot
from pipectl.runtime.manifest import Manifest
from pipectl.runtime.optimizer import Stepper
from pipectl.simulate import simulate
from pipectl.timeline import Timeline

if TYPE_CHECKING:
    from conftest import Command, Program

Patch = pytest.MonkeyPatch
SLURM = ("--scheduler", "slurm")
ALONE = ("plan", "--profile", "p.json")
REHEARSED = '{"attempt":1,"step":1,"steps":1,"time":1,"loss":null,"step_time_s":0.5,"late_s":0}'


def documented() -> dict[str, tuple[bool, set[str]]]:
    """Whether a list is printed, and the keys of an object, by what the first column says.

    A link stands for the keys in the first table of the section that it leads to.
    """
    section = part_of_page("json.md", "json-that-commands-print")
    rows = re.findall(r"^\| `pipectl ([^`]+)`([^|]*) \| (.*) \|$", section, re.MULTILINE)
    found = {}
    for command, of, what in rows:
        keys = set(re.findall(r"`([^`]+)`", what))
        for page, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", what):
            file = re.fullmatch(r"(plan|cluster)json", anchor)
            part = part_of_page(page or "json.md", anchor)
            keys |= {f"{file[1]}.json"} if file else documented_keys(part)
        found[command + of] = what.startswith("a list of "), keys
    return found


def part_of_page(name: str, anchor: str) -> str:
    """The text below the heading with that anchor."""
    page = (CHECKOUT / "docs" / name).read_text(encoding="utf-8")
    parts = re.split(r"^#+ (.*)$", page, flags=re.MULTILINE)[1:]
    texts = dict(zip(map(anchor_of, parts[::2]), parts[1::2], strict=True))
    return texts[anchor]


def keys_of(text: str) -> tuple[bool, set[str]]:
    answer = json.loads(text)
    if isinstance(answer, dict):
        return False, set(answer)
    assert answer, "an empty list says nothing"
    assert {frozenset(item) for item in answer} == {frozenset(answer[0])}
    return True, set(answer[0])


@pytest.fixture
def shown(cli: Command) -> Callable[..., None]:
    """``shown("status RUN", "status", "last")``: that command prints what the page says of it."""

    def check(form: str, *arguments: str) -> None:
        result = cli(*arguments, "--json")
        assert result.code == 0, result.err
        many, keys = documented()[form]
        for file in ("plan.json", "cluster.json"):
            if file in keys:
                keys = keys - {file} | set(json.loads(Path(f"runs/tiny.{file}").read_text()))
        assert keys_of(result.out) == (many, keys)

    return check


Shown = Callable[..., None]


@pytest.fixture
def slurm(program: Program) -> None:
    """Takes every job, and lists none."""
    program("sbatch", "echo 41")
    program("squeue", "exit 0")
    program("sacct", "exit 1")


def test_every_command_that_prints_json_is_there() -> None:
    have = {
        name
        for name, command in commands_of(get_command(app)).items()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert {re.match("(lab )?[a-z]+", form)[0] for form in documented()} == have  # type: ignore[index]


def test_every_row_is_tested() -> None:
    tested = re.findall(r'shown\(\s*"([^"]+)", ', Path(__file__).read_text(encoding="utf-8"))
    assert set(tested) == set(documented())


def test_check(shown: Shown, job: Path) -> None:
    shown("check JOB --origins", "check", "job.yaml", "--origins")


def test_profile(shown: Shown, profile: Path, monkeypatch: Patch) -> None:
    measured = Profile.load(profile)
    monkeypatch.setattr("pipectl.profiler.profile_job", lambda *_, **__: measured)
    shown("profile JOB", "profile", "job.yaml", "--again", "--scheduler", "local")


def test_measuring_in_a_job(shown: Shown, job: Path, slurm: None) -> None:
    shown("profile JOB --submit", "profile", "job.yaml", "--submit", *SLURM)
    shown("profile JOB --submit", "profile", "job.yaml", "--submit", "--links", *SLURM)


def test_links(shown: Shown, job: Path, slurm: None, monkeypatch: Patch) -> None:
    def measured(*_: object, **__: object) -> None:
        Cluster.save(assumed_cluster("two", [1, 1], 1, None), Path("runs/tiny.cluster.json"))

    monkeypatch.setattr("pipectl.cli.commands.profile.follow_or_exit", measured)
    shown("profile JOB --links", "profile", "job.yaml", "--links", *SLURM)


def test_plan(shown: Shown, profile: Path) -> None:
    shown("plan JOB", "plan", "job.yaml", *SLURM)
    shown("plan JOB --explain", "plan", "job.yaml", "--explain", *SLURM)
    shown("lab plan JOB", "lab", "plan", "job.yaml", *SLURM)


def test_other_questions_to_plan(shown: Shown, alone: Path) -> None:
    shown("plan JOB --nodes N,M", *ALONE, "--nodes", "1,2")
    objective = ("--devices", "2", "--objective", "max-stage-load")
    shown("lab plan JOB --objective max-stage-load", "lab", *ALONE, *objective)


def test_simulate(shown: Shown, place: Path) -> None:
    shape = ("--stages", "2", "--micro-batches", "4")
    shown("lab simulate", "lab", "simulate", "--schedule", "1f1b", *shape)


def test_submit_and_resume(cli: Command, shown: Shown, profile: Path, slurm: None) -> None:
    shown("submit JOB", "submit", "job.yaml", *SLURM)
    (run,) = (path for path in Path("runs").iterdir() if path.is_dir())
    (run / "exit_code").write_text("1\n")
    shown("status RUN", "status", "last")
    shown("resume RUN", "resume", "last")


def test_sweeps(shown: Shown, profile: Path, slurm: None, program: Program) -> None:
    with Path("job.yaml").open("a") as job:
        job.write("sweep:\n  grid: {training.seed: [0, 1]}\n")
    shown("submit JOB of a sweep", "submit", "job.yaml", *SLURM)
    (sweep,) = Path("runs/sweeps").iterdir()
    program("squeue", "echo '41_0|RUNNING|1|N/A|N/A|n1||None'")
    shown("status SWEEP", "status", str(sweep))


def test_rehearsals(
    place: Path, shown: Shown, profile: Path, slurm: None, program: Program, monkeypatch: Patch
) -> None:
    shown("lab rehearse JOB, in a queue", "lab", "rehearse", "job.yaml", *SLURM)
    (place / "bin/python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(place / "bin/python"))
    program("mpiexec", f"run=\"${{@: -1}}\"; echo '{REHEARSED}' > $run/metrics.jsonl")
    here = ("--scheduler", "local")
    shown("lab rehearse JOB, here", "lab", "rehearse", "job.yaml", *here)


def test_status(shown: Shown, finished: Path, failed: Path) -> None:
    shown("status", "status")
    shown("status RUN", "status", finished.name)
    shown("status RUN", "status", failed.name)


def test_trace(shown: Shown, place: Path, pipeline: Callable[..., Plan]) -> None:
    run = RunDirectory.create(place / "runs", "gpt", 0.0)
    plan, cluster = pipeline(2, 4), assumed_cluster("c", [2], 1, None)
    write_plan(run, plan, cluster)
    timeline = simulate(plan, cluster).timeline
    Timeline(timeline.events, 2, 5).save(run.measured_of(5))
    shown("report RUN", "report", "last")


def test_export(shown: Shown, finished: Path) -> None:
    saver = Saver(MPI.COMM_SELF, finished / "checkpoints", Keep(3), 1, print)
    saver.start(
        Manifest(5, 4, {}),
        take_snapshot({"model.w": torch.ones(2)}, {"model.w"}, Stepper(None, None), {}),
    )
    saver.finish()
    shown("export RUN", "export", "last")


def test_verify(shown: Shown, job: Path, pipeline: Callable[..., Plan], monkeypatch: Patch) -> None:
    """What tests with real ranks verify is in test_verify_command.py."""
    equal: Any = SimpleNamespace(equal=True, largest=0.0, first=None, losses=[(1.0, 1.0)])
    found = describe(pipeline(2, 4), equal, Reference("one rank"), (), 0.0)
    monkeypatch.setattr("pipectl.cli.lab.verify.verify", lambda *_, **__: found)
    shown("lab verify JOB", "lab", "verify", "job.yaml")


def test_doctor(shown: Shown, place: Path, monkeypatch: Patch) -> None:
    found = [Finding("python", "ok", "3"), Finding("MPI", "warn", "none", "install it")]
    monkeypatch.setattr("pipectl.cli.commands.doctor.examine", lambda *_: found)
    shown("doctor", "doctor")
