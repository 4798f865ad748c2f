"""Submitting a sweep: a run for every point, and one job array for all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.batch import JobRequest, get
from pipectl.batch.process import NoAnswerError
from pipectl.errors import PipectlError, UsageError
from pipectl.files import write_text
from pipectl.jobs.dependencies import jobs_of
from pipectl.jobs.launching import settle
from pipectl.jobs.recovery import refuse_twice
from pipectl.jobs.request import array_request, job_request, make_tag
from pipectl.jobs.submit import Inputs, Submission, record_of, writer
from pipectl.jobs.template import write_script
from pipectl.runs import (
    Members,
    Record,
    RunDirectory,
    Setting,
    SweepDirectory,
    locked,
)
from pipectl.runs.sweep import remove

if TYPE_CHECKING:
    from pipectl.spec import Point


@dataclass(frozen=True)
class Swept:
    """A sweep that was handed over.

    Args:
        submissions: of its runs, in the order of the points.
        job_id: of the array.
    """

    sweep: SweepDirectory
    submissions: tuple[Submission, ...]
    job_id: str


def submit_sweep(
    points: Sequence[Point],
    inputs: Sequence[Inputs],
    at_once: int | None,
    now: float,
    after: Sequence[RunDirectory] = (),
) -> Swept:
    """Create a run directory for every point, and hand one script for all to the batch system.

    All records are written before the batch system is called, with the tag of the array, so that
    a submission which is interrupted can be found again; see :mod:`pipectl.jobs.recovery`.

    Args:
        inputs: what the run of each point starts from.
        at_once: how many may run at the same time; None sets no limit.
        now: seconds since the epoch.
        after: runs that must have completed before any starts.

    Raises:
        UsageError, SchedulerError: as for a single run (:func:`pipectl.jobs.submit.submit`).
    """
    spec, scheduler = points[0].spec, get(inputs[0].scheduler)
    base = Path(spec.output.directory)
    refuse_twice(base, spec.name, now)
    before = jobs_of(after, scheduler.name, now)
    sweep, runs = SweepDirectory.create(base, spec.name, len(points), now)
    with locked(sweep):
        with _removed_on_failure(sweep, runs):
            request = job_request(spec, sweep.path, make_tag(sweep.path), after=before)
            request = array_request(request, runs, at_once)
            script = scheduler.render(request)
            sweep.save(Members(request.tag, tuple(run.name for run in runs), at_once))
            records = list(_written(sweep, points, inputs, runs, request.tag, now))
            write_text(sweep.script, script, mode=0o700)
        array_id = _handed_over(sweep, runs, request)
        found = [
            Submission(run, _told(run, record, scheduler.task_id(array_id, index)), start.plan)
            for index, (run, record, start) in enumerate(zip(runs, records, inputs, strict=True))
        ]
    return Swept(sweep, tuple(found), array_id)


def _written(
    sweep: SweepDirectory,
    points: Sequence[Point],
    inputs: Sequence[Inputs],
    runs: Sequence[RunDirectory],
    tag: str,
    now: float,
) -> Iterator[Record]:
    """The records of all runs, each with all its files on the disk.

    A run's own script has a tag of its own: on PBS it may submit itself again.
    """
    first: dict[int, RunDirectory] = {}
    for index, (point, start, run) in enumerate(zip(points, inputs, runs, strict=True)):
        own = make_tag(run.path)
        request = job_request(
            start.spec, run.path, own, prepare=start.plan is None, plan=start.plan
        )
        request = (start.launch or settle(request)).of(request)
        setting = Setting(sweep.name, {key: recordable(v) for key, v in point.values.items()})
        record = replace(record_of(start, request, now), tag=tag, sweep=setting, task=index)
        alike = None if start.plan is None else first.setdefault(id(start.plan), run)
        writer(run, start, request, None if alike is run else alike)()
        write_script(run, get(start.scheduler).render(request), request)
        record.save(run.record)
        yield record


def _handed_over(sweep: SweepDirectory, runs: Sequence[RunDirectory], request: JobRequest) -> str:
    scheduler = get(Record.load(runs[0].record).scheduler)
    try:
        return scheduler.submit(sweep.script, request)
    except NoAnswerError:
        raise
    except PipectlError as error:
        remove(sweep, runs)
        error.message = error.message.replace(str(sweep.script), "the script of the array")
        raise


def _told(run: RunDirectory, record: Record, job_id: str) -> Record:
    record = record.after(record.submitted_at, "submitted", job_id=job_id)
    with suppress(UsageError):  # it is found by its tag
        record.save(run.record)
    return record


@contextmanager
def _removed_on_failure(sweep: SweepDirectory, runs: Sequence[RunDirectory]) -> Iterator[None]:
    """Leave nothing behind of a sweep that no batch system has heard of."""
    try:
        yield
    except BaseException:
        remove(sweep, runs)
        raise


def recordable(value: Any) -> Any:
    """A value of a sweep as JSON knows it; what JSON does not know, as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list):
        return [recordable(item) for item in value]
    return {str(key): recordable(item) for key, item in value.items()}
