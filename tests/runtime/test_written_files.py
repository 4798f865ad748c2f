"""What ranks write while they train: logs, lines of metrics, the heartbeat and recorded steps.

Nothing about a file ends a rank, and nothing that is written is lost or doubled.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from pipectl.plan import Plan
from pipectl.runs import (
    Logs,
    RunDirectory,
    last_checkpoint,
    measured_steps,
    read_heartbeat,
    read_metrics,
)
from pipectl.runtime import clock, reports
from pipectl.runtime.process import job_log, own_log
from pipectl.runtime.reports import Attempts, Lines
from pipectl.runtime.telemetry import StepReport, Telemetry
from pipectl.schedule import lower
from pipectl.timeline import Timeline

HERE, STEPS = Path(__file__).parent, 15
PRINTED = {f"[{rank}] piece and end": 200 for rank in range(2)}
CHILD = {f"[{rank}] from a child": 1 for rank in range(2)}
LAST = {"rank 0 [2Jbegins": 1, "rank 1 [2Jbegins": 1, "to the launcher": 2}
WORDS = {**PRINTED, "[1] last words": 1}
SHARED = {**PRINTED, "[0] no end": 1, "[1] no end": 1, "from a child": 2, **LAST}


@pytest.fixture
def print_from_ranks(tmp_path, mpiexec):
    """Two ranks print; how often there is which line."""

    def run(how: str) -> Counter[str]:
        directory = RunDirectory(tmp_path)
        directory.logs.mkdir(exist_ok=True)
        program = str(HERE / "printing_ranks.py")
        with directory.job_log.open("wb") as log:
            subprocess.run(
                [mpiexec, "-n", "2", sys.executable, program, how],
                env={**os.environ, "PIPECTL_RUN_DIRECTORY": str(tmp_path)},
                stdout=log,
                stderr=subprocess.STDOUT,
                check=how not in ("killed", "aborts"),
            )
        assert b"\x1b" not in directory.job_log.read_bytes()
        return Counter(line.text for line in Logs(directory).read_lines(to_the_end=True))

    return run


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "lines"),
    [
        ("ends", {**PRINTED, **CHILD, **LAST}),
        ("killed", WORDS),
        ("aborts", WORDS),
        ("cut", {**dict.fromkeys(PRINTED, 100), **CHILD, **LAST}),
        ("shares", SHARED),
    ],
)
def test_lines_of_ranks_are_whole_and_complete(print_from_ranks, how, lines):
    found = print_from_ranks(how)
    assert {line: found[line] for line in lines} == lines
    if how == "ends":
        assert sum(found.values()) == sum(lines.values())


@pytest.mark.mpi
def test_neither_a_full_disk_nor_a_link_ends_a_rank_that_prints(print_from_ranks, tmp_path):
    """A link in the place of a log is not followed: what rank 0 prints goes to the launcher."""
    run, foreign = RunDirectory(tmp_path), tmp_path / "foreign"
    foreign.write_text("mine\n")
    run.logs.mkdir()
    run.rank_log(0).symlink_to(foreign)
    found = print_from_ranks("full")
    assert found["[0] piece and end"] == 0
    assert found["[1] piece and end"] >= 70
    assert foreign.read_text() == "mine\n"
    assert run.rank_log(1).stat().st_size == 1000
    assert stat.S_IMODE(run.rank_log(1).stat().st_mode) == 0o600


def test_outside_of_jobs_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPECTL_RUN_DIRECTORY", raising=False)
    before = Path("/proc/self/fd/1").readlink(), sys.stdout
    with own_log(0, 1):
        assert (Path("/proc/self/fd/1").readlink(), sys.stdout) == before
        assert job_log() == 2


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


def test_lines_wait_until_they_can_be_written_and_the_newest_are_kept(tmp_path, monkeypatch):
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
def test_a_line_that_a_killed_process_left_half_spoils_no_other(tmp_path, before, after):
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    Lines(path, lambda _: None).add(["three"])
    assert path.read_text() == after


@pytest.mark.mpi
def test_training_goes_on_while_the_disk_is_full(make_run, warm_python: str, disk) -> None:
    training = {"steps": STEPS, "batch_size": 4}
    sections = {"training": training, "trace": {"steps": [3]}, "checkpoint": {"every": 3}}
    prepared = make_run(1, {"factory": f"{HERE / 'job_parts.py'}:Paced"}, **sections)
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


@pytest.mark.mpi
def test_two_ranks_whose_clocks_differ_record_every_row_in_one_time(make_run, launch) -> None:
    """Steps 2 to 4 are recorded; whatever one rank sends, the other has only later."""
    run: RunDirectory = make_run(2, trace={"steps": [3], "every": 2})
    done = launch(2, HERE / "changed_ranks.py", "ahead", run.path, fresh=True)
    assert done.returncode == 0, done.stderr
    assert measured_steps(run) == [2, 3, 4]
    plan = Plan.load(run.plan)
    for step in (2, 3, 4):
        timeline = Timeline.load(run.measured_of(step))
        assert (timeline.step, timeline.ranks) == (step, 2)
        assert 0 < timeline.clock_error_s < 1
        assert 0 <= min(event.start_s for event in timeline.events) < 0.1
        assert timeline.end_s < 100
        for rank in range(plan.ranks):
            check_rows(plan, timeline, rank)
        check_messages(timeline, timeline.clock_error_s + 1e-9)


def check_rows(plan: Plan, timeline: Timeline, rank: int) -> None:
    """Every row of its program is there once, one behind the other; the update waits for all."""
    events = list(timeline.of_rank(rank))
    names = [event.kind for event in events]
    rows = [(row.kind.name.lower(), *row[1:4]) for row in lower(plan, rank)]
    assert names.count("update_wait") == 1
    assert names[names.index("update_wait") + 1] == "update"
    assert [tuple(e[3:]) for e in events if e.kind != "update_wait"] == rows
    assert all(one.end_s <= other.start_s for one, other in pairwise(events))
    assert all(event.start_s <= event.end_s for event in events)


def check_messages(timeline: Timeline, error_s: float) -> None:
    sent = {(e.channel, e.micro_batch): e for e in timeline.events if e.kind == "send_start"}
    had = {(e.channel, e.micro_batch): e for e in timeline.events if e.kind == "receive_wait"}
    assert len(sent) == len(had) == 4
    for key, event in sent.items():
        assert had[key].rank != event.rank
        assert event.start_s <= had[key].end_s + error_s


@pytest.mark.mpi
def test_steps_that_overlap_are_recorded_from_their_start(make_run, train) -> None:
    run = make_run(
        2,
        training={"steps": 8, "batch_size": 4},
        pipeline={"schedule": "pipedream-2bw", "micro_batches": 2, "stages": 2},
    )
    train(run)
    assert measured_steps(run) == [1]
    timeline = Timeline.load(run.measured_of(1))
    kinds = Counter(event.kind for event in timeline.of_rank(0))
    assert kinds["update"] >= 4
    assert kinds["forward"] >= 2 * kinds["update"]
    assert timeline.clock_error_s == 0  # two ranks of one machine read the same clock


@pytest.mark.parametrize("what", ["_BOOT", "_NAMESPACE"])
def test_machines_and_namespaces_of_clocks_are_told_apart(monkeypatch, tmp_path, what):
    for name in ("_BOOT", "_NAMESPACE"):
        (tmp_path / name).symlink_to(__file__)
        monkeypatch.setattr(clock, name, tmp_path / name)
    here = clock._machine()
    assert clock._machine() == here
    (tmp_path / "other").write_text("other")
    (tmp_path / what).unlink()
    (tmp_path / what).symlink_to(tmp_path / "other")
    assert clock._machine() != here
