"""Sweeps: a job for every point, a run for every job, and one job array for all runs.

On this machine, ``python -m pipectl.jobs.sweep SWEEP_DIRECTORY`` runs them, one after the other or
a few at a time. The script of the array starts it, and it is there until the last run is over. A
run that it starts is a job of its own from then on, as its record says; cancelled runs are left
out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import Array, JobRequest, get
from pipectl.batch.local import LocalScheduler
from pipectl.batch.process import wait_for_any
from pipectl.errors import PipectlError
from pipectl.jobs.job import Job, Work, make_request
from pipectl.jobs.recover import refuse_duplicate
from pipectl.jobs.submit import Rollback, Submission, hand_over, ids_to_wait_for
from pipectl.runs import Members, Record, RunDirectory, Setting, SweepDirectory, locked, stem_of

if TYPE_CHECKING:
    from pipectl.spec import Point


def submit_sweep(
    points: Sequence[Point],
    jobs: Sequence[Job],
    at_once: int | None,
    now: float,
    after: Sequence[RunDirectory] = (),
) -> tuple[SweepDirectory, tuple[Submission, ...]]:
    """Create a run directory for every point, and hand one script for all to the batch system.

    The records of all runs have the tag of the array. A run's own script has a tag of its own: on
    PBS it may submit itself again.

    Args:
        jobs: of the points.
        at_once: how many may run at the same time; None sets no limit.
        now, after: see :func:`pipectl.jobs.submit.submit`, which raises the same errors.

    Returns:
        The directory of the sweep, and the submissions of its runs in the order of the points.
    """
    spec, scheduler = points[0].spec, jobs[0].scheduler
    base = Path(spec.output.directory)
    refuse_duplicate(base, spec.name, now)
    ids = ids_to_wait_for(after, scheduler, now)
    sweep, runs = SweepDirectory.create(base, spec.name, len(points), now)
    created = [*(run.path for run in runs), sweep.path]
    with locked(sweep), Rollback(created=created) as rollback:
        request = _make_array(jobs[0], sweep, [run.path for run in runs], at_once, after=ids)
        sweep.save(Members(request.tag, tuple(run.name for run in runs), at_once))
        submissions = []
        for index, (point, job, run) in enumerate(zip(points, jobs, runs, strict=True)):
            submission = Submission.new(run, job, now)
            # what JSON does not know, such as infinity, is recorded as text
            values = json.loads(json.dumps(dict(point.values)), parse_constant=str)
            setting = Setting(sweep.name, values)
            record = replace(submission.record, tag=request.tag, sweep=setting, task=index)
            submissions.append(replace(submission, record=record))
        return sweep, hand_over(submissions, rollback, (sweep, request))


def render_array(job: Job, points: int, at_once: int | None, now: float) -> str:
    """The script of a sweep's job array as it would be submitted.

    Args:
        job: of any of its points.
    """
    stem = Path(job.spec.output.directory).absolute() / stem_of(job.spec.name, now)
    sweep, runs = SweepDirectory.beside(stem), [Path(f"{stem}-{i}") for i in range(points)]
    request = _make_array(job, sweep, runs, at_once, tag=f"{stem.name} dry-run")
    return get(job.scheduler).render(request)


def _make_array(
    job: Job,
    sweep: SweepDirectory,
    runs: Sequence[Path],
    at_once: int | None,
    *,
    tag: str | None = None,
    after: tuple[str, ...] = (),
) -> JobRequest:
    """What a batch system is asked for so that it starts the scripts of runs.

    On this machine, where no batch system does, the command of the array starts them.
    """
    driver = replace(job, work=Work(program=("-m", "pipectl.jobs.sweep")), prepares=False)
    request = make_request(driver, sweep.path, tag=tag, after=after)
    return replace(request, array=Array(tuple(runs), at_once))


def drive(sweep: SweepDirectory) -> None:
    """Start all runs of a sweep, as many at a time as it says, and wait for them.

    Raises:
        DataFileError: it cannot be told which they are.
    """
    with locked(sweep):  # until the command that submits it has noted the ids of all runs
        members = sweep.load()
    running = 0
    for run in sweep.runs():
        if running >= (members.at_once or 1) and wait_for_any() is not None:
            running -= 1
        with suppress(PipectlError):  # one that was damaged keeps no other from its turn
            running += _start(run, members.tag, time.time())
    while wait_for_any() is not None:
        pass


def _start(run: RunDirectory, tag: str, now: float) -> bool:
    """Start a run, unless it was cancelled, or has been resumed on its own."""
    with locked(run):
        record = Record.load(run.record)
        if record.task is None or record.tag != tag or record.state == "cancelled":
            return False
        job_id = LocalScheduler().start(run.script, run.path)
        record = replace(record, task=None).after(now, "submitted", job_id=job_id)
        record.save(run.record)
    return True


if __name__ == "__main__":
    drive(SweepDirectory(Path(sys.argv[1])))
