"""The program that runs a sweep on this machine: ``python -m pipectl.jobs.sweep DIRECTORY COUNT``.

It runs COUNT runs at a time. The script of the array starts it, and it ends after the last run. A
run that it has started is a job of its own, with its own id in its record. Cancelled runs are
skipped.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipectl.batch.local import LocalScheduler
from pipectl.batch.process import wait_for_any
from pipectl.errors import PipectlError
from pipectl.runs import Record, RunDirectory, SweepDirectory, locked


def drive(sweep: SweepDirectory, at_once: int) -> None:
    """Start all runs of a sweep, ``at_once`` at a time, and wait for them."""
    with locked(sweep):  # after the submitting command has recorded the ids of all runs
        runs = sweep.runs()
    running = 0
    for run in runs:
        if running >= at_once and wait_for_any() is not None:
            running -= 1
        with suppress(PipectlError):  # a damaged run does not stop the others
            running += _start(run, time.time())
    while wait_for_any() is not None:
        pass


def _start(run: RunDirectory, now: float) -> bool:
    """Start a run unless it was cancelled or resumed on its own."""
    with locked(run):
        record = Record.load(run.record)
        if record.task is None or record.state == "cancelled":
            return False
        job_id = LocalScheduler().start(run.script, run.path)
        record = replace(record, task=None).with_state(now, "submitted", job_id=job_id)
        record.save(run.record)
    return True


if __name__ == "__main__":
    drive(SweepDirectory(Path(sys.argv[1])), int(sys.argv[2]))
