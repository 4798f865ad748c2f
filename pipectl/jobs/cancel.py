"""Ending a run."""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.batch import JobState, get
from pipectl.errors import UnknownRunError
from pipectl.jobs.recovery import completed
from pipectl.jobs.status import RunStatus, status, statuses
from pipectl.runs import RunDirectory, SweepDirectory, locked


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
    return True


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
            count += 1
    return count
