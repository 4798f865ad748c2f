"""Lines of metrics and the heartbeat, also while a disk fails: no line is lost or doubled."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from pipectl.errors import UsageError
from pipectl.runs import RunDirectory, last_checkpoint, read_heartbeat, read_metrics
from pipectl.runtime import reports
from pipectl.runtime.reports import Attempts, Lines
from pipectl.runtime.telemetry import StepReport, Telemetry


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "job", 0.0)


def report(writer: Telemetry, step: int, **changed: Any) -> None:
    fields = {
        "step": step,
        "loss": 2.0 / step,
        "learning_rate": 0.1,
        "gradient_norm": math.nan,
        "step_time_s": 0.5,
        "samples": 8,
    }
    writer.report(StepReport(**{**fields, **changed}), 0.3, 1 << 20)


def telemetry(run: RunDirectory) -> Telemetry:
    found = Telemetry(MPI.COMM_SELF.Dup(), run, steps=3, attempt=1, stages=(0, 1))
    found.state("training")
    return found


def strict(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_line_per_step_is_json_also_of_a_run_that_diverged(
    run: RunDirectory, value: float
) -> None:
    writer = telemetry(run)
    report(writer, 1)
    report(writer, 2, loss=value, gradient_norm=value)
    writer.evaluation(2, {"loss": value})
    writer.finish()
    first, second, held_out = map(strict, run.metrics.read_text().splitlines())
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


def test_a_step_is_written_once_every_rank_has_reported_it(run: RunDirectory) -> None:
    writer = telemetry(run)
    report(writer, 1)
    writer._reports._count = 2  # another rank is behind
    report(writer, 2)
    assert writer.has_written(1)
    assert not writer.has_written(2)
    assert [line.step for line in read_metrics(run)] == [1]


def test_the_heartbeat_says_who_does_what(run: RunDirectory) -> None:
    writer = telemetry(run)
    beat = read_heartbeat(run)
    assert beat is not None
    assert (beat.state, beat.step, beat.steps) == ("training", 0, 3)
    (rank,) = beat.ranks
    assert rank.stages == (0, 1)
    assert rank.pid == os.getpid()
    assert rank.busy_s is None
    report(writer, 1)
    writer.finish()
    beat = strict(run.heartbeat.read_text())
    assert (beat["state"], beat["step"]) == ("done", 1)
    assert beat["ranks"][0]["busy_s"] == 0.3
    assert beat["ranks"][0]["peak_bytes"] == 1 << 20
    assert beat["ranks"][0]["rss_bytes"] > 1 << 20


PARTS = Path(__file__).with_name("job_parts.py")
STEPS = 15


def test_lines_wait_until_they_can_be_written(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path, said.append)
    lines.add(["one"])
    path.rename(tmp_path / "away")
    path.mkdir()
    lines.add(["two"])
    lines.add(["three"])
    assert len(said) == 1
    assert said[0].startswith("metrics.jsonl cannot be written, the job continues: ")
    path.rmdir()
    (tmp_path / "away").rename(path)
    path.write_text(path.read_text() + "tw")  # as a disk leaves it that got full
    lines.add([])
    lines.add(["four"])
    assert path.read_text().split("\n") == ["one", "tw", "two", "three", "four", ""]
    assert said[1:] == ["metrics.jsonl can be written again"]


def test_a_line_that_a_killed_process_left_half_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for before, after in (
        ("one\ntw", "one\ntw\nthree\n"),
        ("one\n", "one\nthree\n"),
        ("", "three\n"),
    ):
        path.write_text(before)
        Lines(path, lambda _: None).add(["three"])
        assert path.read_text() == after


def test_the_newest_lines_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_LINES", 3)
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    lines = Lines(path, lambda _: None)
    lines.add(map(str, range(9)))
    path.rmdir()
    lines.add([])
    assert path.read_text().split() == ["6", "7", "8"]


def test_other_errors_are_not_hidden() -> None:
    def fails() -> None:
        raise UsageError("disk full", cure="")

    attempt = Attempts("it", lambda _: None)
    assert not attempt(fails)
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: [1 // 0])  # type: ignore[arg-type, return-value]


def fill(directory: Path) -> Callable[[], None]:
    """Until there is no byte left; what undoes it."""
    path = directory / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=1k"], capture_output=True, check=False)
    assert shutil.disk_usage(directory).free == 0
    return path.unlink


def make_read_only(directory: Path) -> Callable[[], None]:
    def remount(how: str) -> None:
        command = ["mount", "-o", f"remount,{how}", str(directory)]
        subprocess.run(command, capture_output=True, check=True)

    remount("ro")
    return lambda: remount("rw")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("break_it", "file"),
    [
        (fill, "heartbeat.json"),  # lines may still fit into the last page of their file
        pytest.param(make_read_only, "metrics.jsonl", marks=pytest.mark.torture),
    ],
)
def test_training_goes_on_while_the_disk_fails(
    make_run,
    warm_python: str,
    disk,
    break_it: Callable[[Path], Callable[[], None]],
    file: str,
) -> None:
    training = {"steps": STEPS, "batch_size": 4}
    sections = {"training": training, "trace": {"steps": [3]}, "checkpoint": {"every": 3}}
    prepared = make_run(1, {"factory": f"{PARTS}:Paced"}, **sections)
    directory = disk("2m")
    run = RunDirectory(directory / "run")
    shutil.copytree(prepared.path, run.path)
    worker = [warm_python, "-m", "mpi4py", "-m", "pipectl.runtime.worker", "--run", str(run.path)]
    process = subprocess.Popen(worker, stderr=subprocess.PIPE, text=True)
    wait_for(process, lambda: len(read_metrics(run)) >= 1)
    mend = break_it(directory)
    assert process.stderr is not None
    log = ""
    for line in process.stderr:
        log += line
        if f"{file} cannot be written, the job continues: " in line:
            break
    mend()
    log += process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0, log
    assert f"{file} cannot be written, the job continues: " in log
    assert f"{file} can be written again" in log
    assert [line.step for line in read_metrics(run)] == [*range(1, STEPS + 1)]
    last, beat = last_checkpoint(run), read_heartbeat(run)
    assert last is not None
    assert last.name == f"step-{STEPS:06d}"
    assert beat.state == "done"


def wait_for(process: subprocess.Popen[str], done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 280
    while not done():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
