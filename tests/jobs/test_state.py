"""How often batch systems are asked by somebody who watches, and what metrics say of a run."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipectl.batch import JobState, JobStatus
from pipectl.jobs import recover, state
from pipectl.jobs.state import Poller, RunStatus, get_statuses
from pipectl.plan import StageCost
from pipectl.runs import Heartbeat, Record, RunDirectory
from pipectl.runs.readers import Measured, MetricsLine, sum_up


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scheduler:
    """Counts the questions."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.searched: list[str] = []
        self.job_of_tag: str | None = None

    def find(self, tag: str) -> str | None:
        self.searched.append(tag)
        return self.job_of_tag

    def query(self, ids: Any, *, since: float) -> dict[str, JobStatus]:
        self.asked.append(list(ids))
        return {job_id: JobStatus(JobState.RUNNING) for job_id in ids}


@pytest.fixture
def schedulers(monkeypatch):
    found = {"slurm": Scheduler(), "local": Scheduler()}
    for module in (state, recover):
        monkeypatch.setattr(module, "get_scheduler", lambda name, _timeout_s: found[name])
    return found


def run(tmp_path: Path, job_id: str, scheduler: str = "slurm") -> RunDirectory:
    made = RunDirectory.create(tmp_path, "demo", 1.7e9)
    Record("demo", scheduler, "t", 1.7e9, 1, 1, 5, state="submitted", job_id=job_id).save(
        made.record
    )
    return made


def test_questions_become_rare(tmp_path, schedulers):
    clock, runs = Clock(), [run(tmp_path, "7")]
    poller = Poller(clock)
    for _ in range(2 * 600):
        (found,) = poller.get_statuses(runs, 1.7e9)
        assert found.job.state is JobState.RUNNING
        clock.now += 0.5
    assert 10 <= len(schedulers["slurm"].asked) <= 17, "in ten minutes"
    assert poller._queries["slurm"].pause_s == 60.0


def interrupted(tmp_path: Path) -> RunDirectory:
    made = RunDirectory.create(tmp_path, "demo", 1.7e9)
    Record("demo", "slurm", made.name, 1.7e9, 1, 1, 5).save(made.record)
    return made


def test_searches_for_a_job_become_rare_too(tmp_path, schedulers):
    clock, runs = Clock(), [interrupted(tmp_path), run(tmp_path, "7")]
    poller, slurm = Poller(clock), schedulers["slurm"]
    for _ in range(2 * 600):
        found, _ = poller.get_statuses(runs, 1.7e9 + 600)
        assert found.job.state is JobState.UNKNOWN
        clock.now += 0.5
    assert 10 <= len(slurm.searched) <= 17, "in ten minutes"
    slurm.job_of_tag = "8"
    clock.now += 60
    assert poller.get_statuses(runs, 1.7e9)[0].job.state is JobState.RUNNING
    assert sorted(slurm.asked[-1]) == ["7", "8"]
    count = len(slurm.asked)
    assert poller.get_statuses(runs, 1.7e9)[0].job.state is JobState.RUNNING
    assert len(slurm.asked) == count


def test_a_new_job_is_asked_about_at_once(tmp_path, schedulers):
    poller = Poller(Clock())
    first = run(tmp_path, "7")
    poller.get_statuses([first], 1.7e9)
    poller.get_statuses([first, run(tmp_path, "8")], 1.7e9)
    assert [sorted(ids) for ids in schedulers["slurm"].asked] == [["7"], ["7", "8"]]


def test_a_job_less_is_no_reason_to_ask(tmp_path, schedulers):
    poller = Poller(Clock())
    first, second = run(tmp_path, "7"), run(tmp_path, "8")
    poller.get_statuses([first, second], 1.7e9)
    (found,) = poller.get_statuses([second], 1.7e9)
    assert found.job.state is JobState.RUNNING
    assert len(schedulers["slurm"].asked) == 1


def test_a_job_that_has_left_its_exit_code_is_asked_about_at_once(tmp_path, schedulers):
    poller, ended = Poller(Clock()), run(tmp_path, "7")
    poller.get_statuses([ended], 1.7e9)
    ended.exit_code.write_text("0\n")
    poller.get_statuses([ended], 1.7e9)
    assert schedulers["slurm"].asked == [["7"], ["7"]]


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.RUNNING])
def test_while_the_next_start_waits_nothing_is_going_on(tmp_path, schedulers, monkeypatch, state):
    waiting = run(tmp_path, "41")
    Heartbeat("training", 2, 9).save(waiting.heartbeat)
    line = {"attempt": 1, "step": 2, "steps": 9, "loss": 1.5, "step_time_s": 0.1}
    waiting.metrics.write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(schedulers["slurm"], "query", lambda *_, **__: {"41": JobStatus(state)})
    (found,) = get_statuses([waiting], 1.7e9)
    going = state is JobState.RUNNING
    assert found.phase == ("training" if going else "")
    assert (found.measured.remaining_s is not None) == going
    assert found.measured.step == 2


def test_processes_of_this_machine_are_looked_at_every_time(tmp_path, schedulers):
    poller = Poller(Clock())
    runs = [run(tmp_path, "7"), run(tmp_path, "9.1@here", "local")]
    for _ in range(3):
        poller.get_statuses(runs, 1.7e9)
    assert len(schedulers["local"].asked) == 3
    assert len(schedulers["slurm"].asked) == 1


@pytest.mark.parametrize(("file", "patience_s"), [("heartbeat.json", 10), ("", 60)])
def test_a_queue_that_hangs_is_waited_for_while_nothing_else_tells_of_a_run(
    tmp_path, monkeypatch, file, patience_s
):
    made, waited = run(tmp_path, "7"), []
    if file:
        (made.path / file).write_text("{}")

    def hang(*_, timeout, **__):
        waited.append(timeout)
        raise subprocess.TimeoutExpired("squeue", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    poller = Poller(Clock())
    (found,) = poller.get_statuses([made], 1.7e9 + 600)
    assert waited == [patience_s]
    assert f"squeue: no answer within {patience_s} s" in found.job.reason


def test_of_several_searches_only_the_first_waits_for_a_queue_that_hangs(tmp_path, monkeypatch):
    runs, waited = [interrupted(tmp_path), interrupted(tmp_path), run(tmp_path, "7")], []
    for each in runs:
        each.exit_code.write_text("1\n")

    def hang(*_, timeout, **__):
        waited.append(timeout)
        raise subprocess.TimeoutExpired("squeue", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    statuses = Poller(Clock()).get_statuses(runs, 1.7e9 + 600)
    assert waited == [10]
    assert [status.job.state for status in statuses] == [JobState.FAILED] * 3
    assert {status.query_error for status in statuses} == {"squeue: no answer within 10 s"}


@pytest.mark.parametrize(("times_s", "expected_s"), [([9.0], 9.0), ([9.0, 1.0], 1.0)])
def test_with_few_steps_the_last_one_counts(times_s, expected_s):
    lines = [MetricsLine(1, n, step_time_s=time_s) for n, time_s in enumerate(times_s, 1)]
    assert sum_up(lines).step_time_s == expected_s


@pytest.mark.parametrize(("batch_size", "expected"), [(8, 1.0), (4, 4 / 7)])
def test_efficiency_is_profiled_compute_over_the_ranks_time(pipeline, batch_size, expected):
    cost = StageCost(1.0, 2.0, 1.0, 0, 0, 0)
    plan = pipeline(2, 2, costs=[cost] * 2, micro_batch_size=4, batch_size=batch_size)
    job, measured = JobStatus(JobState.RUNNING), Measured(step_time_s=7.0)
    status = RunStatus(RunDirectory(Path("x")), None, job, "training", measured, plan, (), None)
    assert status.efficiency == pytest.approx(expected)
