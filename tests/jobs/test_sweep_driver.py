"""Runs of a sweep on this machine, over real processes; their scripts wait for a file."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
from job_requests import make_request

from pipectl.batch import Array, JobState, get_scheduler
from pipectl.batch.local import LocalScheduler
from pipectl.jobs.cancel import Cancellation, cancel, cancel_sweep
from pipectl.jobs.state import get_statuses
from pipectl.runs import Record, RunDirectory, Setting, SweepDirectory, locked

LOCAL = get_scheduler("local")
SCRIPT = """\
trap 'echo 143 >"{run}/exit_code"; exit 143' TERM
touch "{run}/started"
until [[ -e "{run}/go" ]]; do sleep 0.05; done
echo 0 >"{run}/exit_code"
"""
NUMBERS = count()
"""Of sweeps: jobs are found by the name, and those of earlier tests may still be there."""


@pytest.fixture
def start(tmp_path):
    """Starts a sweep of some runs, a few at a time, as its submission does."""

    def submit(points, at_once, *, told=True):
        name = f"tiny{os.getpid()}-{next(NUMBERS)}"
        sweep, runs = SweepDirectory.create(tmp_path, name, points, time.time())
        request = make_request(
            sweep.path,
            tag=sweep.name,
            python=sys.executable,
            command=(sys.executable, "-m", "pipectl.jobs.sweep", str(sweep.path), str(at_once)),
            array=Array(tuple(run.path for run in runs), at_once),
        )
        with locked(sweep):
            sweep.script.write_text(LOCAL.render(request))
            for run in runs:
                run.script.write_text(SCRIPT.format(run=run.path))
            array_id = LOCAL.submit(sweep.script, request)
            now = time.time()
            record = Record(name, "local", request.tag, now, 1, 1, 4)
            for index, run in enumerate(runs):
                here = replace(record, sweep=Setting(sweep.name, {"n": index}), task=index)
                job_id = LOCAL.task_id(array_id, index)
                here = here.with_state(now, "submitted", job_id=job_id) if told else here
                here.save(run.record)
        return sweep, runs

    return submit


def states(runs: Sequence[RunDirectory]) -> list[JobState]:
    return [status.job.state for status in get_statuses(runs, time.time())]


def until(runs: Sequence[RunDirectory], *wanted: JobState) -> None:
    deadline = time.monotonic() + 120
    while (found := states(runs)) != list(wanted):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_a_few_at_a_time_in_their_order(start):
    queued, running, completed = JobState.QUEUED, JobState.RUNNING, JobState.COMPLETED
    sweep, runs = start(4, 2)
    until(runs, running, running, queued, queued)
    assert LOCAL.find(sweep.name) is not None
    (runs[1].path / "go").touch()
    until(runs, running, completed, running, queued)
    for run in runs:
        (run.path / "go").touch()
    until(runs, *[completed] * 4)
    assert all(Record.load(run.record).task is None for run in runs)


def test_cancelled_runs_never_start(start):
    sweep, runs = start(4, 1)
    until(runs, JobState.RUNNING, *[JobState.QUEUED] * 3)
    assert cancel(runs[1], time.time()) is Cancellation.ASKED
    until(runs, JobState.RUNNING, JobState.CANCELLED, *[JobState.QUEUED] * 2)
    (runs[0].path / "go").touch()
    until(runs, JobState.COMPLETED, JobState.CANCELLED, JobState.RUNNING, JobState.QUEUED)
    assert cancel_sweep(sweep, time.time()) == 2
    until(runs, JobState.COMPLETED, *[JobState.CANCELLED] * 3)
    started = [(run.path / "started").exists() for run in runs]
    assert started == [True, False, True, False]
    assert cancel(runs[3], time.time()) is Cancellation.OVER


def test_a_run_that_ends_while_others_are_cancelled_has_completed(start, monkeypatch):
    sweep, runs = start(2, 2)
    until(runs, JobState.RUNNING, JobState.RUNNING)
    end = LocalScheduler.cancel

    def slowly(self, job_id):
        end(self, job_id)
        (runs[1].path / "go").touch()
        until(runs[1:], JobState.COMPLETED)

    monkeypatch.setattr(LocalScheduler, "cancel", slowly)
    assert cancel_sweep(sweep, time.time()) == 1
    until(runs, JobState.CANCELLED, JobState.COMPLETED)


def test_what_waits_for_a_driver_that_is_gone_never_starts(start):
    sweep, runs = start(2, 1)
    until(runs, JobState.RUNNING, JobState.QUEUED)
    driver = LOCAL.find(sweep.name)
    assert driver is not None
    LocalScheduler(grace_s=0.1).cancel(driver)
    until(runs[1:], JobState.FAILED)
    assert "never started" in get_statuses(runs, time.time())[1].job.reason


def test_runs_of_an_interrupted_submission_are_started_and_found(start):
    _, runs = start(3, 1, told=False)
    until(runs, JobState.RUNNING, *[JobState.QUEUED] * 2)
    assert ["[" in (Record.load(run.record).job_id or "") for run in runs] == [False, True, True]
    for run in runs:
        (run.path / "go").touch()
    until(runs, *[JobState.COMPLETED] * 3)
