"""Cancelling runs."""

from __future__ import annotations

import time
from enum import Enum

from pipectl.batch import CHECKPOINTED, JobState, JobStatus, get_scheduler
from pipectl.errors import SchedulerError, UnknownRunError
from pipectl.files import is_there
from pipectl.jobs.recover import BY_TAG, recover
from pipectl.jobs.state import get_status, get_statuses
from pipectl.runs import (
    Record,
    RunDirectory,
    SweepDirectory,
    locked,
    name_in_shell,
    read_exit_code,
    read_starts,
)

_PATIENCE_S, _PAUSE_S = 10.0, 0.2


class Cancellation(Enum):
    """Outcome of cancelling a run, in words."""

    ASKED = "cancelled: {run}"
    OVER = "{run} had already ended"
    REMOVED = "{run} had already ended; its job was still listed and is cancelled"
    COMPLETED = "{run} was complete before it could be cancelled"


def cancel(run: RunDirectory, now: float) -> Cancellation:
    """Ask the batch system to end a run.

    The job of a run that is over may still be in the queue, for example while a node does not
    answer. It is removed, and the run stays completed or failed.

    Raises:
        UnknownRunError: its job is not known, so nothing can be ended.
        SchedulerError: the batch system refuses or does not answer.
    """
    with locked(run):
        record = recover(run, now, is_locked=True)
        if record.job_id is None:
            has_started = read_starts(run) > 0
            raise UnknownRunError(
                f"{run.name}: its submission was never confirmed, and no job has its tag",
                hint=f"if nothing runs: pipectl resume --force {name_in_shell(run)}"
                if has_started
                else f"if nothing runs, remove {run.path}",
            )
        status = get_status(run, now)
        if status.job.state.final and status.query_error is None:
            return Cancellation.OVER
        return _end(run, record, status.job, record.job_id, now)


def cancel_sweep(sweep: SweepDirectory, now: float) -> int:
    """Ask the batch system to end all runs of a sweep, those in its array by one command.

    Returns:
        The number of runs that were not over.

    Raises:
        UnknownRunError: no job of the sweep is known.
        SchedulerError: the batch system refuses or does not answer.
    """
    statuses = get_statuses(sweep.runs(), now)
    submitted = [
        status
        for status in statuses
        if status.record is not None and status.record.job_id is not None
    ]
    if not submitted:
        for fault in filter(None, (status.query_error for status in statuses)):
            raise SchedulerError(f"{sweep.name}: {fault}", hint="try again in a minute")
        raise UnknownRunError(
            f"{sweep.name}: its submission was never confirmed, and no job has its tag",
            hint=f"if nothing runs, remove {sweep.path} and its runs",
        )
    alive = [status for status in submitted if not status.job.state.final]
    # On this machine, queued runs come first: the end of another run would start them.
    alive.sort(key=lambda status: status.job.state is not JobState.QUEUED)
    arrays: set[str] = set()
    count = 0
    for status in alive:
        run, record = status.run, status.record
        if record is None or record.task is None:
            count += cancel(run, now) is Cancellation.ASKED
            continue
        with locked(run):
            record = recover(run, now, is_locked=True)
            if record.job_id is not None:
                array_id = get_scheduler(record.scheduler).array_id(record.job_id)
                job_id = None if array_id in arrays else array_id
                count += _end(run, record, status.job, job_id, now) is Cancellation.ASKED
                arrays.add(array_id)
    return count


def _end(
    run: RunDirectory, record: Record, job: JobStatus, job_id: str | None, now: float
) -> Cancellation:
    """Cancel a job, and record that unless the run is over according to its exit code.

    A job script whose ranks stopped at a checkpoint may have submitted its next job, and not have
    written its id yet. That job is cancelled, too.

    Args:
        job_id: job or array to cancel; None if it is cancelled already.
    """
    start = run.start
    has_ended = not job.state.waits and read_exit_code(start) not in {None, CHECKPOINTED}
    scheduler = get_scheduler(record.scheduler)
    if job_id is not None:
        scheduler.cancel(job_id)
    if has_ended:
        return Cancellation.REMOVED
    if read_exit_code(start) == 0:  # it was in its last step, say
        return Cancellation.COMPLETED
    record.with_state(now, "cancelled").save(run.record)
    if not scheduler.resubmits or not is_there(start.stopped_marker):
        return Cancellation.ASKED
    deadline = time.monotonic() + _PATIENCE_S
    while (newest := recover(run, now, is_locked=True)).job_id == record.job_id:
        if read_exit_code(start) is not None or time.monotonic() > deadline:
            break
        time.sleep(_PAUSE_S)
    # The job of a run in an array does not have the tag of the record.
    if newest.job_id == record.job_id and record.task is None:
        found = scheduler.find_all([record.tag], scheduler.cluster_of(newest.job_id or ""))
        newest = newest.with_state(now, "submitted", job_id=found.get(record.tag), detail=BY_TAG)
    if newest.job_id is not None and newest.job_id != record.job_id:
        scheduler.cancel(newest.job_id)
        newest.with_state(now, "cancelled").save(run.record)
    return Cancellation.ASKED
