"""Ending a run."""

from __future__ import annotations

from pipectl.batch import get
from pipectl.errors import UnknownRunError
from pipectl.jobs.recovery import completed
from pipectl.jobs.status import status
from pipectl.runs import RunDirectory, locked


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
