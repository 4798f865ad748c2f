"""Sweeps: a job for every point, a run for every job, and one job array for all runs.

On this machine, ``python -m pipectl.jobs.sweep SWEEP_DIRECTORY`` runs them, one after the other or
a few at a time. The script of the array starts it, and it is there until the last run is over. A
run that it starts is a job of its own from then on, as its record says; cancelled runs are left
out.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.batch import MpiChoice, get
from pipectl.batch.local import LocalScheduler
from pipectl.batch.process import wait_for_any
from pipectl.errors import PipectlError
from pipectl.jobs.places import LOCAL, check_answering
from pipectl.jobs.prepare import Job, add_plan, add_profile, make_job
from pipectl.jobs.profiles import Progress, find_or_measure
from pipectl.jobs.recover import refuse_duplicate
from pipectl.jobs.request import array_request, job_request, make_tag
from pipectl.jobs.submit import Rollback, Start, Submission, hand_over, jobs_of, record_of
from pipectl.runs import Members, Record, RunDirectory, Setting, SweepDirectory, locked
from pipectl.spec import plan_key, profile_key

if TYPE_CHECKING:
    from pipectl.spec import JobSpec, Point


@dataclass(frozen=True)
class SweepSubmission:
    """A sweep that the batch system has.

    Args:
        submissions: of its runs, in the order of the points.
        job_id: of the array.
    """

    sweep: SweepDirectory
    submissions: tuple[Submission, ...]
    job_id: str


def prepare_points(
    spec: JobSpec,
    points: Sequence[Point],
    scheduler: str | None,
    progress: Progress | None = None,
) -> list[Job]:
    """The jobs of all points; what several of them share is measured, and planned, once.

    On a batch system, points without a profile are left to their jobs, see
    :func:`pipectl.jobs.prepare.prepare`.

    Args:
        spec: the job without the values of its sweep.

    Raises:
        PipectlError: as for a single job; the message says of which point.
    """
    check_answering(spec, scheduler)
    base = make_job(spec, scheduler)
    measures = profile_key(spec) in {profile_key(point.spec) for point in points}
    base = add_profile(base, progress, make=measures)
    known = {} if base.profile is None else {profile_key(spec): base}
    launches: dict[str, MpiChoice | None] = {}
    jobs = []
    for point in points:
        with _naming(point):
            launch = f"{point.spec.launch} {point.spec.environment}"
            job = make_job(point.spec, base.scheduler, launch=launches.get(launch), check=True)
            launches[launch] = job.launch
            key = profile_key(point.spec)
            if key not in known and job.scheduler == LOCAL:
                measurement = find_or_measure(point.spec, progress)
                known[key] = replace(job, profile=measurement.profile, measurement=measurement)
            if key in known:
                same = known[key]
                job = replace(job, profile=same.profile, measurement=same.measurement)
            jobs.append(job)
    if plan_key(spec) in {plan_key(point.spec) for point in points}:
        base = add_plan(base, progress)
    plans = {} if base.plan is None else {plan_key(spec): base.plan}
    for index, (point, job) in enumerate(zip(points, jobs, strict=True)):
        if job.profile is not None and job.cluster is not None:
            from pipectl.jobs.planning import find_plan
            from pipectl.runtime.supported import check_supported

            key = plan_key(point.spec)
            with _naming(point):
                if key not in plans:
                    plans[key] = find_plan(job.spec, job.profile, job.cluster)
                    check_supported(plans[key], "the plan")
            jobs[index] = replace(job, plan=plans[key])
    return jobs


@contextmanager
def _naming(point: Point) -> Iterator[None]:
    """Begin errors with the values of a point: ``optimizer.kwargs.lr=0.001, training.seed=2``."""
    try:
        yield
    except PipectlError as error:
        values = ", ".join(f"{key}={value}" for key, value in point.values.items())
        error.message = f"{values}: {error.message}"
        raise


def submit_sweep(
    points: Sequence[Point],
    jobs: Sequence[Job],
    at_once: int | None,
    now: float,
    after: Sequence[RunDirectory] = (),
) -> SweepSubmission:
    """Create a run directory for every point, and hand one script for all to the batch system.

    The records of all runs have the tag of the array. A run's own script has a tag of its own: on
    PBS it may submit itself again.

    Args:
        jobs: of the points.
        at_once: how many may run at the same time; None sets no limit.
        now: seconds since the epoch.
        after: runs that must have completed before any starts.

    Raises:
        UsageError, SchedulerError: as for a single run (:func:`pipectl.jobs.submit.submit`).
    """
    spec, scheduler = points[0].spec, jobs[0].scheduler
    base = Path(spec.output.directory)
    refuse_duplicate(base, spec.name, now)
    awaited = jobs_of(after, scheduler, now)
    sweep, runs = SweepDirectory.create(base, spec.name, len(points), now)
    created = [*(run.path for run in runs), sweep.path]
    with locked(sweep), Rollback(created=created) as rollback:
        template, tag = jobs[0].template, make_tag(sweep.path)
        request = job_request(spec, sweep.path, tag, after=awaited, template=template)
        request = array_request(request, runs, at_once)
        sweep.save(Members(request.tag, tuple(run.name for run in runs), at_once))
        starts = []
        for index, (point, job, run) in enumerate(zip(points, jobs, runs, strict=True)):
            own = job.request(run.path)
            values = {key: recordable(value) for key, value in point.values.items()}
            record = record_of(job, own, now)
            record = replace(record, tag=request.tag, sweep=Setting(sweep.name, values), task=index)
            starts.append(Start(run, job, own, record))
        submissions = hand_over(starts, rollback, (sweep, request))
    job_id = submissions[0].record.job_id
    assert job_id is not None
    return SweepSubmission(sweep, submissions, get(scheduler).array_id(job_id))


def recordable(value: Any) -> Any:
    """A value of a sweep as JSON knows it; what JSON does not know, as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list):
        return [recordable(item) for item in value]
    return {str(key): recordable(item) for key, item in value.items()}


def drive(sweep: SweepDirectory, clock: Callable[[], float] = time.time) -> None:
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
            running += _start(run, members.tag, clock())
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
