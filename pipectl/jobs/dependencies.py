"""Runs that must have completed before another one starts."""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.batch import JobState, get
from pipectl.errors import UsageError
from pipectl.jobs.status import RunStatus, statuses
from pipectl.runs import Record, RunDirectory, as_typed, sweep_of

PBS = "pbs"


def jobs_of(runs: Sequence[RunDirectory], scheduler: str, now: float) -> tuple[str, ...]:
    """The ids of their jobs, without those of runs that have completed already.

    Args:
        scheduler: that the next job goes to.
        now: seconds since the epoch.

    Raises:
        UsageError: a run has failed, is on another batch system, or its job is not known.
    """
    found = [status for status in statuses(runs, now) if status.job.state is not JobState.COMPLETED]
    jobs = tuple(_job_of(status, scheduler) for status in found)
    return _arrays([status.run for status in found], runs, jobs) if scheduler == PBS else jobs


def _arrays(
    awaited: Sequence[RunDirectory], named: Sequence[RunDirectory], jobs: Sequence[str]
) -> tuple[str, ...]:
    """On PBS nothing can wait for a single job of an array: the arrays, where all runs are named.

    Raises:
        UsageError: not all runs of an array are.
    """
    array_id = get(PBS).array_id
    for run, record in ((run, Record.load(run.record)) for run in awaited):
        alone = record.job_id is None or array_id(record.job_id) == record.job_id
        if record.sweep is None or alone:
            continue
        sweep = sweep_of(run, record.sweep.name)
        if not set(sweep.runs()) <= set(named):
            raise UsageError(
                f"--after {run.name}: PBS lets no job wait for one of an array",
                cure=f"wait for all of it: --after {as_typed(sweep)}",
            )
    return tuple(dict.fromkeys(map(array_id, jobs)))


def _job_of(status: RunStatus, scheduler: str) -> str:
    name, record = status.run.name, status.record
    if status.job.state.final:
        raise UsageError(
            f"--after {name}: is {status.job.state.value}, so nothing would ever start",
            cure=f"`pipectl resume {as_typed(status.run)}` first",
        )
    if record is None or record.job_id is None:
        raise UsageError(
            f"--after {name}: its job is not known",
            cure=f"see `pipectl status {as_typed(status.run)}`",
        )
    if record.scheduler != scheduler:
        raise UsageError(
            f"--after {name}: is on {record.scheduler}, and this job goes to {scheduler}",
            cure=f"wait for its end, or submit with --scheduler {record.scheduler}",
        )
    return record.job_id
