"""What ranks write while they train: logs, lines of metrics, the heartbeat and recorded steps.

Nothing about a file ends a rank, and nothing that is written is lost or doubled.
"""

from __future__ import annotations

import json
import math
import os
import resource
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
from pipectl.runtime.reports import Attempts, Lines
from pipectl.runtime.telemetry import StepReport, Telemetry
from pipectl.schedule import lower
from pipectl.timeline import Timeline

HERE, STEPS = Path(__file__).parent, 15
PARTS = HERE / "job_parts.py"
PRINTED = {f"[{rank}] piece and end": 200 for rank in range(2)}
CUT = dict.fromkeys(PRINTED, 100) | {f"[{rank}] from a child": 1 for rank in range(2)}
LAST = {"rank 0 [2Jbegins": 1, "rank 1 [2Jbegins": 1, "to the launcher": 2}
REPLACED = {
    **PRINTED,
    **{f"[{rank}] from a child": 1 for rank in range(2)},
    **{f"rank {rank} goes on": 1 for rank in range(2)},
}
SHARED = {**PRINTED, "[0] no end": 1, "[1] no end": 1, "from a child": 2, **LAST}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "lines"),
    [
        ("cut", {**CUT, **LAST}),
        ("killed", {**PRINTED, "[1] last words": 1}),
        ("aborts", {**PRINTED, "[1] last words": 1}),
        ("shares", SHARED),
        ("replaced", {**REPLACED, **LAST}),
        ("full", {"[0] piece and end": 0}),
    ],
)
def test_lines_of_ranks_are_whole_and_complete(tmp_path, mpiexec, how, lines):
    """A link in the place of a log is not followed: what rank 0 prints goes to the launcher. A full
    disk ends no rank."""
    run, foreign = RunDirectory(tmp_path), tmp_path / "foreign"
    run.logs.mkdir()
    foreign.write_text("mine\n")
    if how == "full":
        run.rank_log(0).symlink_to(foreign)
    with run.job_log.open("wb") as log:
        done = subprocess.run(
            [mpiexec, "-n", "2", sys.executable, HERE / "printing_ranks.py", how],
            env={**os.environ, "PIPECTL_RUN_DIRECTORY": str(tmp_path)},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert b"\x1b" not in run.job_log.read_bytes()
    found = Counter(line.text for line in Logs(run).read_lines(to_the_end=True))
    assert {line: found[line] for line in lines} == lines
    if how in ("killed", "aborts"):
        return
    assert done.returncode == 0
    if how == "full":
        assert found["[1] piece and end"] >= 70
        assert foreign.read_text() == "mine\n"
        assert run.rank_log(1).stat().st_size == 1000
        assert stat.S_IMODE(run.rank_log(1).stat().st_mode) == 0o600
    else:
        assert found == lines


def strict(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_lines_and_heartbeat_of_a_run_that_diverged_are_json(tmp_path: Path, value: float) -> None:
    run = RunDirectory.create(tmp_path, "job", 0.0)
    writer = Telemetry(MPI.COMM_SELF.Dup(), run.start, steps=3, stages=(0, 1))
    writer.begin("training")
    beat = read_heartbeat(run.start)
    (rank,) = beat.ranks
    assert (beat.state, beat.step, beat.steps) == ("training", 0, 3)
    assert (rank.stages, rank.pid, rank.busy_s) == ((0, 1), os.getpid(), None)
    writer.report(
        StepReport(1, (2.0,), 0.1, math.nan, step_time_s=0.5, samples=8), 0.3, (0.3, 0.3), 1 << 20
    )
    writer._reports._count = 2  # another rank is behind
    writer.report(
        StepReport(2, (value,), 0.1, value, step_time_s=0.5, samples=8), 0.3, (0.3, 0.3), 1 << 20
    )
    assert writer.has_written(1)
    assert not writer.has_written(2)
    assert [line.step for line in read_metrics(run)] == [1]
    writer._reports._count = 1
    writer.evaluation(2, {"loss": value})
    writer.finish()
    first, held_out, second = map(strict, run.metrics.read_text().splitlines())
    assert first.pop("time") <= second["time"]
    figures = {"loss": 2.0, "step_time_s": 0.5, "samples_per_s": 16.0, "learning_rate": 0.1}
    known = {"attempt": 1, "step": 1, "steps": 3, "plan": ""}  # without a plan.json
    assert first == {**known, **figures, "gradient_norm": None}
    assert second["loss"] is second["gradient_norm"] is None
    assert held_out["evaluation"] == {"loss": None}
    beat = strict(run.start.heartbeat.read_text())
    assert (beat["state"], beat["step"]) == ("done", 2)
    assert (beat["ranks"][0]["busy_s"], beat["ranks"][0]["peak_bytes"]) == (0.3, 1 << 20)
    assert beat["ranks"][0]["rss_bytes"] > 1 << 20


def test_lines_wait_until_they_can_be_written_and_none_spoils_another(tmp_path, monkeypatch):
    """The newest are kept. A killed process, or a disk that got full, leaves half a line."""
    monkeypatch.setattr(reports, "MAX_LINES", 3)
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    Lines(path, said.append).add(["one"])
    Lines(path, said.append).add(["two"])
    path.write_text("one\ntwo\nthr")
    lines = Lines(path, said.append)
    lines.add(["three"])
    path.rename(tmp_path / "away")
    path.mkdir()
    lines.add(["four"])
    lines.add(["five", "six", "seven"])
    assert len(said) == 1
    assert said[0].startswith("metrics.jsonl cannot be written, the job continues: ")
    path.rmdir()
    (tmp_path / "away").rename(path)
    path.write_text(path.read_text() + "fi")
    lines.add([])
    lines.add(["eight"])
    assert path.read_text() == "one\ntwo\nthr\nthree\nfi\nfive\nsix\nseven\neight\n"
    assert said[1:] == ["metrics.jsonl can be written again"]
    with pytest.raises(ZeroDivisionError):  # no other error is hidden
        Attempts("it", said.append)(lambda: 1 // 0)


def test_lines_that_a_full_disk_has_taken_in_part_are_written_once(tmp_path):
    path, said = tmp_path / "metrics.jsonl", list[str]()
    lines = Lines(path, said.append)
    lines.add(["first"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, before[1]))
    try:
        lines.add(["second", "third"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "first\n"
    assert len(said) == 1
    lines.add(["fourth"])
    assert path.read_text() == "first\nsecond\nthird\nfourth\n"


@pytest.mark.mpi
def test_only_rank_0_writes_the_metrics_and_after_a_killed_process_none_is_torn(
    make_run, train
) -> None:
    run = make_run(2)
    run.metrics.write_text('{"step": 1}\n{"st')
    train(run)
    lines = run.metrics.read_text().split("\n")
    assert lines[:2] == ['{"step": 1}', '{"st']
    assert [json.loads(line)["step"] for line in lines[2:-1]] == [1, 2, 3, 4, 5]
    assert lines[-1] == ""


@pytest.mark.mpi
def test_training_goes_on_while_the_disk_is_full(make_run, warm_python: str, disk) -> None:
    training = {"steps": STEPS, "batch_size": 4}
    sections = {"training": training, "trace": {"steps": [3]}, "checkpoint": {"every": 3}}
    directory = disk("2m")
    run, filler = RunDirectory(directory / "run"), directory / "filler"
    shutil.copytree(make_run(1, {"factory": f"{PARTS}:Paced"}, **sections).path, run.path)
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
    assert read_heartbeat(run.start).state == "done"


@pytest.mark.mpi
def test_two_ranks_whose_hashes_and_clocks_differ_agree_and_record_every_row_in_one_time(
    make_run, launch, train, different
) -> None:
    """Nothing that ranks compare depends on how a process hashes: not even ``hash(None)``. All data
    end with one sample.

    Steps 3 to 5 are recorded: every row of a rank's program once, one behind the other, and the
    update waits for all; whatever one rank sends, the other has only later. In place of the last
    step, whose batch has one sample, the one before is; the last is recorded because of ``every``,
    which says how it differs."""
    held_out = {"data": {"factory": f"{PARTS}:Samples", "kwargs": {"count": 5}}, "batch_size": 4}
    job = {"data": {"kwargs": {"count": 17}}, "evaluation": held_out}
    run, alone = make_run(2, **job, trace={"steps": [3, 30], "every": 5}), make_run(1, **job)
    done = launch(2, HERE / "changed_ranks.py", "ahead", run.path, fresh=True)
    assert done.returncode == 0, done.stderr
    train(alone)
    assert different(run, alone) == []
    assert measured_steps(run) == [3, 4, 5]
    assert Timeline.load(run.measured_of(5)).differs == "its batch had 1 of 4 samples"
    plan = Plan.load(run.plan)
    for step in (3, 4):
        timeline = Timeline.load(run.measured_of(step))
        assert (timeline.step, timeline.ranks, timeline.differs) == (step, 2, None)
        assert 0 < timeline.clock_error_s < 1
        assert 0 <= min(event.start_s for event in timeline.events) < 100
        assert timeline.end_s < 100
        for rank in range(plan.ranks):
            events = list(timeline.of_rank(rank))
            rows = [(row.kind.name.lower(), *row[1:4]) for row in lower(plan, rank)]
            wait = [event.kind for event in events].index("update_wait")
            assert events[wait + 1].kind == "update"
            assert [tuple(e[3:]) for e in events[:wait] + events[wait + 1 :]] == rows
            assert all(one.end_s <= other.start_s for one, other in pairwise(events))
            assert all(event.start_s <= event.end_s for event in events)
        sent, had = (
            {(e.channel, e.micro_batch): e for e in timeline.events if e.kind == kind}
            for kind in ("send_start", "receive_wait")
        )
        assert len(sent) == len(had) == 4
        for key, event in sent.items():
            assert had[key].rank != event.rank
            assert event.start_s <= had[key].end_s + timeline.clock_error_s + 1e-9


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
    for name in ("here", "there"):
        (tmp_path / f"{name}.txt").write_text(name)
        (tmp_path / name).symlink_to(f"{name}.txt")
    for read in ("_BOOT", "_NAMESPACE"):
        monkeypatch.setattr(clock, read, tmp_path / "here")
    here = clock.machine()
    monkeypatch.setattr(clock, what, tmp_path / "there")
    assert clock.machine() != here
