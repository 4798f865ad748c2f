"""Runs that must have completed before another one starts."""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.batch import JobState
from pipectl.errors import UsageError
from pipectl.jobs.status import RunStatus, statuses
from pipectl.runs import RunDirectory


def jobs_of(runs: Sequence[RunDirectory], scheduler: str, now: float) -> tuple[str, ...]:
    """The ids of their jobs, without those of runs that have completed already.

    Args:
        scheduler: that the next job goes to.
        now: seconds since the epoch.

    Raises:
        UsageError: a run has failed, is on another batch system, or its job is not known.
    """
    found = [status for status in statuses(runs, now) if status.job.state is not JobState.COMPLETED]
    return tuple(_job_of(status, scheduler) for status in found)


def _job_of(status: RunStatus, scheduler: str) -> str:
    name, record = status.run.name, status.record
    if status.job.state.final:
        raise UsageError(
            f"--after {name}: is {status.job.state.value}, so nothing would ever start",
            cure=f"`pipectl resume {name}` first",
        )
    if record is None or record.job_id is None:
        raise UsageError(
            f"--after {name}: its job is not known", cure=f"see `pipectl status {name}`"
        )
    if record.scheduler != scheduler:
        raise UsageError(
            f"--after {name}: is on {record.scheduler}, and this job goes to {scheduler}",
            cure=f"wait for its end, or submit with --scheduler {record.scheduler}",
        )
    return record.job_id
