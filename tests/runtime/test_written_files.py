"""Lines of metrics and the heartbeat, also while a disk fails: no line is lost or doubled."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from pipectl.runs import RunDirectory, last_checkpoint, read_heartbeat, read_metrics
from pipectl.runtime import reports
from pipectl.runtime.reports import Attempts, Lines
from pipectl.runtime.telemetry import StepReport, Telemetry

PARTS, STEPS = Path(__file__).with_name("job_parts.py"), 15


def strict(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def report(writer: Telemetry, step: int, loss: float, norm: float = math.nan) -> None:
    writer.report(StepReport(step, loss, 0.1, norm, step_time_s=0.5, samples=8), 0.3, 1 << 20)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_lines_and_heartbeat_of_a_run_that_diverged_are_json(tmp_path: Path, value: float) -> None:
    run = RunDirectory.create(tmp_path, "job", 0.0)
    writer = Telemetry(MPI.COMM_SELF.Dup(), run, steps=3, attempt=1, stages=(0, 1))
    writer.state("training")
    beat = read_heartbeat(run)
    (rank,) = beat.ranks
    assert (beat.state, beat.step, beat.steps) == ("training", 0, 3)
    assert (rank.stages, rank.pid, rank.busy_s) == ((0, 1), os.getpid(), None)
    report(writer, 1, 2.0)
    writer._reports._count = 2  # another rank is behind
    report(writer, 2, value, value)
    assert writer.has_written(1)
    assert not writer.has_written(2)
    assert [line.step for line in read_metrics(run)] == [1]
    writer._reports._count = 1
    writer.evaluation(2, {"loss": value})
    writer.finish()
    first, held_out, second = map(strict, run.metrics.read_text().splitlines())
    assert first.pop("time") <= second["time"]
    assert first == {
        "attempt": 1,
        "step": 1,
        "steps": 3,
        "loss": 2.0,
        "step_time_s": 0.5,
        "samples_per_s": 16.0,
        "learning_rate": 0.1,
        "gradient_norm": None,
    }
    assert second["loss"] is second["gradient_norm"] is None
    assert held_out["evaluation"] == {"loss": None}
    beat = strict(run.heartbeat.read_text())
    assert (beat["state"], beat["step"]) == ("done", 2)
    assert (beat["ranks"][0]["busy_s"], beat["ranks"][0]["peak_bytes"]) == (0.3, 1 << 20)
    assert beat["ranks"][0]["rss_bytes"] > 1 << 20


def test_lines_wait_until_they_can_be_written_and_the_newest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "MAX_LINES", 3)
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path, said.append)
    lines.add(["one"])
    path.rename(tmp_path / "away")
    path.mkdir()
    lines.add(["two"])
    lines.add(["three", "four", "five"])
    assert len(said) == 1
    assert said[0].startswith("metrics.jsonl cannot be written, the job continues: ")
    path.rmdir()
    (tmp_path / "away").rename(path)
    path.write_text(path.read_text() + "tw")  # as a disk leaves it that got full
    lines.add([])
    lines.add(["six"])
    assert path.read_text().split("\n") == ["one", "tw", "three", "four", "five", "six", ""]
    assert said[1:] == ["metrics.jsonl can be written again"]
    with pytest.raises(ZeroDivisionError):  # no other error is hidden
        Attempts("it", said.append)(lambda: 1 // 0)


@pytest.mark.parametrize(
    ("before", "after"),
    [("one\ntw", "one\ntw\nthree\n"), ("one\n", "one\nthree\n"), ("", "three\n")],
)
def test_a_line_that_a_killed_process_left_half_spoils_no_other(
    tmp_path: Path, before: str, after: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    Lines(path, lambda _: None).add(["three"])
    assert path.read_text() == after


@pytest.mark.mpi
def test_training_goes_on_while_the_disk_is_full(make_run, warm_python: str, disk) -> None:
    training = {"steps": STEPS, "batch_size": 4}
    sections = {"training": training, "trace": {"steps": [3]}, "checkpoint": {"every": 3}}
    prepared = make_run(1, {"factory": f"{PARTS}:Paced"}, **sections)
    directory = disk("2m")
    run, filler = RunDirectory(directory / "run"), directory / "filler"
    shutil.copytree(prepared.path, run.path)
    worker = [warm_python, "-m", "mpi4py", "-m", "pipectl.runtime.worker", "--run", str(run.path)]
    full = "heartbeat.json cannot be written, the job continues: "  # lines may still fit a page
    log = ""
    with subprocess.Popen(worker, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            log += line
            if line.startswith("step 1 "):
                subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=1k"], check=False)
                assert shutil.disk_usage(directory).free == 0
            if full in line:
                filler.unlink()
    assert process.returncode == 0, log
    assert full in log
    assert "heartbeat.json can be written again" in log
    assert [line.step for line in read_metrics(run)] == [*range(1, STEPS + 1)]
    assert last_checkpoint(run).name == f"step-{STEPS:06d}"
    assert read_heartbeat(run).state == "done"
