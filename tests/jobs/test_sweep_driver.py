"""Runs of a sweep on this machine, over real processes; their scripts wait for a file."""

import os
import sys
import time
from dataclasses import replace
from itertools import count

import pytest
from job_requests import make_request, wait_until

from pipectl.batch import Array, JobState, get_scheduler
from pipectl.batch.local import LocalScheduler
from pipectl.jobs.cancel import Cancellation, cancel, cancel_sweep
from pipectl.jobs.state import get_statuses
from pipectl.runs import Record, Setting, SweepDirectory, locked

LOCAL = get_scheduler("local")
QUEUED, RUNNING, COMPLETED = JobState.QUEUED, JobState.RUNNING, JobState.COMPLETED
CANCELLED, FAILED = JobState.CANCELLED, JobState.FAILED
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


def until(runs, *wanted):
    def reached():
        return [status.job.state for status in get_statuses(runs, time.time())] == list(wanted)

    wait_until(reached, 120, 0.05)


def go(*runs):
    for run in runs:
        (run.path / "go").touch()


@pytest.mark.parametrize("told", [True, False])
def test_a_few_run_at_a_time_in_their_order_and_what_is_cancelled_never_starts(
    start, monkeypatch, told
):
    """Also after a submission that was interrupted before it told the ids."""
    sweep, runs = start(5, 2, told=told)
    until(runs, RUNNING, RUNNING, QUEUED, QUEUED, QUEUED)
    waiting = ["[" in (Record.load(run.record).job_id or "") for run in runs]
    assert waiting == [False, False, True, True, True]
    assert LOCAL.find(sweep.name) is not None
    assert cancel(runs[2], time.time()) is Cancellation.ASKED
    go(runs[1])
    until(runs, RUNNING, COMPLETED, CANCELLED, RUNNING, QUEUED)
    end = LocalScheduler.cancel

    def slowly(self, job_id):
        end(self, job_id)
        go(runs[3])
        until(runs[3:4], COMPLETED)

    monkeypatch.setattr(LocalScheduler, "cancel", slowly)
    assert cancel_sweep(sweep, time.time()) == 2, "one has completed meanwhile"
    until(runs, CANCELLED, COMPLETED, CANCELLED, COMPLETED, CANCELLED)
    started = [True, True, False, True, False]
    assert [(run.path / "started").exists() for run in runs] == started
    assert [Record.load(run.record).task is None for run in runs] == started
    assert cancel(runs[4], time.time()) is Cancellation.OVER


def test_what_waits_for_a_driver_that_is_gone_never_starts(start):
    sweep, runs = start(2, 1)
    until(runs, RUNNING, QUEUED)
    driver = LOCAL.find(sweep.name)
    assert driver is not None
    LocalScheduler(grace_s=0.1).cancel(driver)
    until(runs[1:], FAILED)
    assert "never started" in get_statuses(runs, time.time())[1].job.reason
