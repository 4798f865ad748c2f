"""Submissions that were interrupted: their jobs are found in the queue by their tag."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pipectl.batch import get
from pipectl.errors import DataFileError, PipectlError, UsageError
from pipectl.runs import Record, RunDirectory, list_runs, locked

_LOOKED_AT = 10
"""Runs of one name, the newest."""


def recovered(run: RunDirectory, now: float) -> Record:
    """The record of a run; completed, where its submission was interrupted and reached the queue.

    Nothing is changed while another command has the run.

    Args:
        now: seconds since the epoch.

    Raises:
        DataFileError: there is no record, or it is damaged.
    """
    record = Record.load(run.record)
    if record.job_id is not None:
        return record
    with locked(run, wait=False) as ours:
        return completed(run, now) if ours else record


def completed(run: RunDirectory, now: float) -> Record:
    """What :func:`recovered` does, for a caller that has the run.

    Raises:
        DataFileError: there is no record, or it is damaged.
    """
    record = Record.load(run.record)
    if record.job_id is not None or record.state != "submitting":
        return record
    with suppress(PipectlError):
        job_id = get(record.scheduler).find(record.tag)
        if job_id is not None:
            record = record.after(now, "submitted", job_id=job_id, detail="found by its tag")
            record.save(run.record)
    return record


def refuse_twice(base: Path, name: str, now: float) -> None:
    """Raise if an earlier submission of a job was interrupted, but is in the queue.

    It is raised once: the run's record is complete from then on.

    Raises:
        UsageError: naming the run.
    """
    mine = [run for run in list_runs(base) if run.name.split("-", 2)[2].startswith(name)]
    for run in mine[-_LOOKED_AT:]:
        with suppress(DataFileError):
            before = Record.load(run.record)
            if before.name == name and before.job_id is None:
                found = recovered(run, now)
                if found.job_id is not None:
                    raise _twice(run, found)


def _twice(run: RunDirectory, record: Record) -> UsageError:
    return UsageError(
        f"{run.name}: was interrupted while it was submitted, and is {record.scheduler} job "
        f"{record.job_id}; nothing was submitted now",
        cure=f"follow it with `pipectl status {run.name}`, or end it with `pipectl cancel`; for "
        "another run beside it, submit again",
    )
