"""Local jobs that something ends: `status` and `logs` name it, `resume` goes on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipectl.runs import RunDirectory, read_metrics
from pipectl.spec import dump

pytestmark = [pytest.mark.mpi, pytest.mark.torture, pytest.mark.timeout(600)]
PARTS = Path(__file__).parent.parent / "job_parts.py"
STEPS, RANKS = 60, 2
SECTIONS = {
    "model": {"factory": f"{PARTS}:Model", "kwargs": {"depth": 3, "dropout": 0.1}},
    "optimizer": {"factory": "torch.optim:AdamW"},
    "training": {"steps": STEPS, "batch_size": 4},
    "checkpoint": {"every": 2},
    "launch": {"hang_after": "5s"},
}


@dataclass(frozen=True)
class Job:
    """A run in a directory of its own, by the commands alone."""

    folder: Path
    run: RunDirectory

    def ask(self, *arguments: str) -> str:
        return command(self.folder, *arguments)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.ask("status", "last", "--json")))

    def wait(self, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + 240
        while not done(found := self.status()):
            assert time.monotonic() < deadline, found
            time.sleep(0.5)
        return found


def command(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pipectl", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 6), done.stderr + done.stdout
    return done.stdout


@pytest.fixture
def job(make_spec, tmp_path: Path) -> Job:
    """Submitted, and some steps on its way."""
    spec = make_spec(RANKS, {"factory": f"{PARTS}:Paced", "shuffle": True}, **SECTIONS)
    (tmp_path / "job.yaml").write_text(dump(spec))
    answer = json.loads(command(tmp_path, "submit", "job.yaml", "--scheduler", "local", "--json"))
    found = Job(tmp_path, RunDirectory(Path(answer["directory"])))
    found.wait(lambda status: status["step"] >= 3)
    return found


def process_of(job: Job, who: str) -> psutil.Process:
    if who.startswith("rank"):
        pids = {rank["rank"]: rank["pid"] for rank in job.status()["ranks"]}
        return psutil.Process(pids[int(who[-1])])
    script = psutil.Process(int(job.status()["job_id"].split(".")[0]))
    return script if who == "script" else script.children()[0]


@pytest.mark.parametrize(
    ("who", "how", "words"),
    [
        ("rank 0", "kill", "its process was killed"),
        ("rank 1", "kill", "its process was killed"),
        ("rank 0", "suspend", "its process is stopped (SIGSTOP)"),
        ("rank 1", "suspend", "its process is stopped (SIGSTOP)"),
        ("launcher", "kill", "the launcher "),
        ("script", "kill", "the job script that started it is gone"),
    ],
)
def test_the_job_ends_is_explained_and_goes_on(job: Job, who: str, how: str, words: str) -> None:
    victim = process_of(job, who)
    script = process_of(job, "script")
    family = [script, *script.children(recursive=True)]
    assert len(family) >= 3 + RANKS
    getattr(victim, how)()
    _, alive = psutil.wait_procs(family, timeout=5 + 15)
    assert not alive
    last = job.status()
    assert last["state"] == "FAILED"
    assert words in last["error"]["message"]
    text = job.ask("status", "last")
    assert words in text
    assert "step" in text
    if who.startswith("rank"):
        assert last["error"]["where"].startswith(f"{who} on ")
        # It has no stage while it saves.
        line = rf"pipectl: {who} on \S+, (stage {who[-1]}, )?.*step \d+: {re.escape(words)}"
        assert re.search(line, job.ask("logs", "last"))
    job.ask("resume", "last")
    assert job.wait(lambda status: status["state"] not in ("RUNNING", "QUEUED"))["error"] is None
    assert job.status()["state"] == "COMPLETED"
    lines = read_metrics(job.run)
    assert [line.step for line in lines] == [*range(1, STEPS + 1)]
    assert {line.attempt for line in lines} == {1, 2}
