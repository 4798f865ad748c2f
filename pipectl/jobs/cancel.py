"""Ending runs."""

from __future__ import annotations

import time
from enum import Enum

from pipectl.batch import CHECKPOINTED, JobState, JobStatus, get
from pipectl.errors import UnknownRunError
from pipectl.jobs.recover import recover_locked
from pipectl.jobs.state import ask_schedulers, get_statuses
from pipectl.runs import Record, RunDirectory, SweepDirectory, locked, read_exit_code

_RESUBMITS = "pbs"
"""The batch system on which job scripts submit themselves again."""
_PATIENCE_S, _LOOK_S = 10.0, 0.2


class Cancellation(Enum):
    """What became of the wish to end a run."""

    ASKED = "the batch system was asked to end it"
    OVER = "it was over already"
    REMOVED = "it was over already, but the batch system was asked to remove its job"


def cancel(run: RunDirectory, now: float) -> Cancellation:
    """Ask the batch system to end a run, and its job as long as the queue may list it.

    The job of a run that is over can stay in the queue: while a node does not answer, say. It is
    removed; the run stays what it was, completed or failed.

    Args:
        now: seconds since the epoch.

    Raises:
        UnknownRunError: its job is not known, so that nothing can be ended.
        SchedulerError: the batch system refuses or does not answer.
    """
    with locked(run):
        record = recover_locked(run, now)
        if record.job_id is None:
            raise UnknownRunError(
                f"{run.name}: its submission was never confirmed, and no job carries its tag",
                cure=f"if nothing runs, remove {run.path}",
            )
        answers = ask_schedulers([record])
        job = get_statuses([run], now, lambda _: answers)[0].job
        if job.state.final and answers[record.scheduler].error is None:
            return Cancellation.OVER
        has_ended = _has_ended(run, job)
        get(record.scheduler).cancel(record.job_id)
        if not has_ended:
            _record_end(run, record, now)
    return Cancellation.REMOVED if has_ended else Cancellation.ASKED


def cancel_sweep(sweep: SweepDirectory, now: float) -> int:
    """Ask the batch system to end all runs of a sweep, those of its array by one command.

    Args:
        now: seconds since the epoch.

    Returns:
        How many were not over already.

    Raises:
        UnknownRunError: the job of none is known.
        SchedulerError: the batch system refuses or does not answer.
    """
    known = [
        status
        for status in get_statuses(sweep.runs(), now)
        if status.record is not None and status.record.job_id is not None
    ]
    if not known:
        raise UnknownRunError(
            f"{sweep.name}: its submission was never confirmed, and no job carries its tag",
            cure=f"if nothing runs, remove {sweep.path} and its runs",
        )
    alive = [status for status in known if not status.job.state.final]
    # On this machine, those that wait must know before the end of others makes them start.
    alive.sort(key=lambda status: status.job.state is not JobState.QUEUED)
    arrays: set[str] = set()
    count = 0
    for status in alive:
        record = status.record
        if record is None or record.task is None:
            count += cancel(status.run, now) is Cancellation.ASKED
            continue
        with locked(status.run):
            record = recover_locked(status.run, now)
            if record.job_id is None:
                continue
            scheduler = get(record.scheduler)
            array_id = scheduler.array_id(record.job_id)
            has_ended = _has_ended(status.run, status.job)
            if array_id not in arrays:
                scheduler.cancel(array_id)
                arrays.add(array_id)
            if not has_ended:
                _record_end(status.run, record, now)
                count += 1
    return count


def _has_ended(run: RunDirectory, job: JobStatus) -> bool:
    """Whether the run is over by its own word, and its job does not wait to start it again."""
    return not job.state.waits and read_exit_code(run) not in {None, CHECKPOINTED}


def _record_end(run: RunDirectory, record: Record, now: float) -> None:
    """Note that a run was cancelled, and end the job that its script may just have submitted.

    A script does so after the ranks stopped at a checkpoint, and may not have got to tell of it.

    Args:
        record: of the job that was ended.
    """
    record.after(now, "cancelled").save(run.record)
    if record.scheduler != _RESUBMITS or not run.stopped.exists():
        return
    deadline = time.monotonic() + _PATIENCE_S
    while (newest := recover_locked(run, now)).job_id == record.job_id:
        if read_exit_code(run) is not None or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S)
    scheduler = get(record.scheduler)
    # The tag of an array is not its runs'.
    if newest.job_id == record.job_id and record.task is None:
        job_id = scheduler.find(record.tag)
        newest = newest.after(now, "submitted", job_id=job_id, detail="found by its tag")
    if newest.job_id is not None and newest.job_id != record.job_id:
        scheduler.cancel(newest.job_id)
        newest.after(now, "cancelled").save(run.record)
