"""Ending a run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipectl.batch import JobState, get
from pipectl.errors import UnknownRunError
from pipectl.jobs.recovery import completed
from pipectl.jobs.status import RunStatus, status, statuses
from pipectl.runs import Record, RunDirectory, SweepDirectory, locked, read_exit_code

_RESUBMITS = "pbs"
"""The batch system on which job scripts submit themselves again."""
_PATIENCE_S, _LOOK_S = 10.0, 0.2


def cancel(run: RunDirectory, now: float) -> bool:
    """Ask the batch system to end a run.

    Args:
        now: seconds since the epoch.

    Returns:
        False if the run was over already; nothing was done then.

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
        if status(run, now).job.state.final:
            return False
        get(record.scheduler).cancel(record.job_id)
        record.after(now, "cancelled").save(run.record)
        _end_next(run, record, now)
    return True


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
            if own and status(item.run, now).job.state.final:
                continue
            job_id = record.job_id if own else scheduler.array_id(record.job_id)
            if job_id not in ended:
                scheduler.cancel(job_id)
                ended.add(job_id)
            record.after(now, "cancelled").save(item.run.record)
            _end_next(item.run, record, now)
            count += 1
    return count
