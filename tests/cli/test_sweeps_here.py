"""Runs of a sweep on this machine, over real processes; their ranks wait for a file."""

import sys
import time
from pathlib import Path

import pytest
from job_requests import wait_until

from pipectl.batch.local import LocalScheduler
from pipectl.jobs.state import get_statuses
from pipectl.runs import Record, RunDirectory

RANKS = """\
[[ $1 == --version ]] && exit 1
while [[ $1 != --run ]]; do shift; done
: >$2/started
until [[ -e $2/go ]]; do sleep 0.05; done
"""


@pytest.fixture
def start(cli, sweep, program, monkeypatch):
    """``start(5, 2)``: five runs, two at a time."""
    program("mpiexec", RANKS)
    python = program("python", f'exec {sys.executable} "$@"')
    monkeypatch.setattr(sys, "executable", str(python))

    def submit(points, at_once):
        grid = f"{{grid: {{training.seed: {[*range(points)]}}}, at_once: {at_once}}}"
        result = cli("submit", "job.yaml", "--scheduler", "local", "--set", f"sweep={grid}")
        assert result.code == 0, result.err
        return [RunDirectory(path) for path in sorted(Path("runs").glob("2*-tiny-*"))]

    yield submit
    cli("cancel", "tiny")


def until(runs, *wanted):
    def reached():
        return [status.job.state for status in get_statuses(runs, time.time())] == list(wanted)

    wait_until(reached, 120, 0.05)


def test_a_few_run_at_a_time_in_their_order_and_what_is_cancelled_never_starts(
    cli, start, monkeypatch
):
    runs = start(5, 2)
    until(runs, "RUNNING", "RUNNING", "QUEUED", "QUEUED", "QUEUED")
    assert cli("cancel", runs[2].name).out == f"cancelled: {runs[2].name}\n"
    (runs[1].path / "go").touch()
    until(runs, "RUNNING", "COMPLETED", "CANCELLED", "RUNNING", "QUEUED")
    end = LocalScheduler.cancel

    def slowly(self, job_id):
        end(self, job_id)
        (runs[3].path / "go").touch()
        until(runs[3:4], "COMPLETED")

    monkeypatch.setattr(LocalScheduler, "cancel", slowly)
    assert cli("cancel", "tiny").out.startswith("cancelled: 2 of the 5 runs"), "one is complete"
    until(runs, "CANCELLED", "COMPLETED", "CANCELLED", "COMPLETED", "CANCELLED")
    started = [True, True, False, True, False]
    assert [(run.path / "started").exists() for run in runs] == started
    assert [Record.load(run.record).task is None for run in runs] == started
    assert cli("cancel", runs[4].name).out == f"{runs[4].name} had already ended\n"


def test_what_waits_for_a_driver_that_is_gone_never_starts(start):
    runs = start(2, 1)
    until(runs, "RUNNING", "QUEUED")
    driver = LocalScheduler().find(Record.load(runs[1].record).tag)
    LocalScheduler(grace_s=0.1).cancel(driver)
    until(runs[1:], "FAILED")
    assert "never started" in get_statuses(runs, time.time())[1].job.reason
