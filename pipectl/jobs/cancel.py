"""Ending a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum

from pipectl.batch import CHECKPOINTED, JobState, JobStatus, get
from pipectl.errors import UnknownRunError
from pipectl.jobs.recovery import completed
from pipectl.jobs.status import RunStatus, ask, statuses
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
        record = completed(run, now)
        if record.job_id is None:
            raise UnknownRunError(
                f"{run.name}: its submission was never confirmed, and no job carries its tag",
                cure=f"if nothing runs, remove {run.path}",
            )
        job, answered = _ask(run, record, now)
        if job.state.final and answered:
            return Cancellation.OVER
        ended = _has_ended(run, job)
        get(record.scheduler).cancel(record.job_id)
        if ended:
            return Cancellation.REMOVED
        record.after(now, "cancelled").save(run.record)
        _end_next(run, record, now)
    return Cancellation.ASKED


def _ask(run: RunDirectory, record: Record, now: float) -> tuple[JobStatus, bool]:
    """The state of a run's job, and whether its batch system has answered."""
    answers = ask([record])
    job = statuses([run], now, lambda _: answers)[0].job
    return job, answers[record.scheduler].error is None


def _has_ended(run: RunDirectory, job: JobStatus) -> bool:
    """Whether the run is over by its own word, and its job does not wait to start it again."""
    return not job.state.waits and read_exit_code(run) not in {None, CHECKPOINTED}


def _end_next(run: RunDirectory, record: Record, now: float) -> None:
    """End the job that a script may just have submitted to go on, whose end came too late for that.

    It does so behind ranks that stopped at a checkpoint, and may not have got to tell of it.

    Args:
        record: of the job that was ended.
    """
    if record.scheduler != _RESUBMITS or not run.stopped.exists():
        return
    deadline = time.monotonic() + _PATIENCE_S
    while (found := completed(run, now)).job_id == record.job_id:
        if read_exit_code(run) is not None or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S)
    scheduler = get(record.scheduler)
    # The tag of an array is not its runs'.
    if found.job_id == record.job_id and record.task is None:
        job_id = scheduler.find(record.tag)
        found = found.after(now, "submitted", job_id=job_id, detail="found by its tag")
    if found.job_id is not None and found.job_id != record.job_id:
        scheduler.cancel(found.job_id)
        found.after(now, "cancelled").save(run.record)


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
    found = statuses(sweep.runs(), now)
    known = [item for item in found if item.record is not None and item.record.job_id is not None]
    if not known:
        raise UnknownRunError(
            f"{sweep.name}: its submission was never confirmed, and no job carries its tag",
            cure=f"if nothing runs, remove {sweep.path} and its runs",
        )
    alive = [item for item in known if not item.job.state.final]
    # On this machine, those that wait must know before the end of others makes them start.
    alive.sort(key=lambda item: item.job.state is not JobState.QUEUED)
    return _end(alive, now)


def _end(alive: Sequence[RunStatus], now: float) -> int:
    """How many were ended; that of others takes time, in which one may come to its own end."""
    ended: set[str] = set()
    count = 0
    for item in alive:
        with locked(item.run):
            record = completed(item.run, now)
            if record.job_id is None:
                continue
            scheduler = get(record.scheduler)
            own = record.task is None
            job, answered = _ask(item.run, record, now) if own else (item.job, True)
            if job.state.final and answered:
                continue
            ended_before = _has_ended(item.run, job)
            job_id = record.job_id if own else scheduler.array_id(record.job_id)
            if job_id not in ended:
                scheduler.cancel(job_id)
                ended.add(job_id)
            if ended_before:
                continue
            record.after(now, "cancelled").save(item.run.record)
            _end_next(item.run, record, now)
            count += 1
    return count
