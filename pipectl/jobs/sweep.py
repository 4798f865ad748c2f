"""The program that runs a sweep on this machine: ``python -m pipectl.jobs.sweep DIRECTORY COUNT``.

It runs so many at a time. The script of the array starts it, and it is there until the last run is
over. A run that it starts is a job of its own from then on, as its record says; cancelled runs are
left out.
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
    """Start all runs of a sweep, so many at a time, and wait for them."""
    with locked(sweep):  # once the command that submits it has noted the ids of all runs
        runs = sweep.runs()
    running = 0
    for run in runs:
        if running >= at_once and wait_for_any() is not None:
            running -= 1
        with suppress(PipectlError):  # one that was damaged keeps no other from its turn
            running += _start(run, time.time())
    while wait_for_any() is not None:
        pass


def _start(run: RunDirectory, now: float) -> bool:
    """Start a run, unless it was cancelled, or has been resumed on its own."""
    with locked(run):
        record = Record.load(run.record)
        if record.task is None or record.state == "cancelled":
            return False
        job_id = LocalScheduler().start(run.script, run.path)
        record = replace(record, task=None).after(now, "submitted", job_id=job_id)
        record.save(run.record)
    return True


if __name__ == "__main__":
    drive(SweepDirectory(Path(sys.argv[1])), int(sys.argv[2]))
