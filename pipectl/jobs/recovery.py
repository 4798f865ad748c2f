"""Jobs that no record names: of interrupted submissions, and those that others submitted."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pipectl.access import is_ours, read_limited
from pipectl.batch import Scheduler, get
from pipectl.errors import DataFileError, PipectlError, UsageError
from pipectl.runs import Record, RunDirectory, as_typed, is_job_id, list_runs, locked, sweep_of

_LOOKED_AT = 10
"""Runs of one name, the newest."""
_LINE = 1000


def recovered(run: RunDirectory, now: float) -> Record:
    """The record of a run; completed, where its job is not the one that it names.

    That is so where a submission was interrupted, but reached the queue (the job is found by its
    tag), and where a job script submitted itself again, since the batch system requeues none.
    Nothing is changed while another command has the run, or if it is another user's.

    Args:
        now: seconds since the epoch.

    Raises:
        DataFileError: there is no record, or it is damaged.
    """
    record = Record.load(run.record)
    if record.job_id is not None and _next_job(run) in {None, record.job_id}:
        return record
    if not is_ours(run.path):
        return continued(run, record, now)
    with locked(run, wait=False) as ours:
        return completed(run, now, wait=False) if ours else record


def completed(run: RunDirectory, now: float, *, wait: bool = True) -> Record:
    """What :func:`recovered` does, for a caller that has the run.

    Args:
        wait: whether to wait for a command that has the sweep of the run.

    Raises:
        DataFileError: there is no record, or it is damaged.
    """
    known = Record.load(run.record)
    record = continued(run, known, now)
    if record is not known:
        with suppress(UsageError):  # it is read from the same file the next time
            record.save(run.record)
        return record
    if record.job_id is not None or record.state != "submitting":
        return record
    if record.task is not None and record.sweep is not None:
        return _found_in_array(run, record, record.sweep.name, now, wait=wait)
    with suppress(PipectlError):
        job_id = get(record.scheduler).find(record.tag)
        if job_id is not None:
            record = record.after(now, "submitted", job_id=job_id, detail="found by its tag")
            record.save(run.record)
    return record


def _found_in_array(
    run: RunDirectory, record: Record, sweep: str, now: float, *, wait: bool
) -> Record:
    """The record of a run of a sweep; all of its runs get their ids, with one question."""
    directory = sweep_of(run, sweep)
    with locked(directory, wait=wait) as ours, suppress(PipectlError):
        if ours and Record.load(run.record).job_id is None:
            scheduler = get(record.scheduler)
            array_id = scheduler.find(record.tag)
            if array_id is not None:
                for other in directory.runs():
                    with locked(other, wait=False) as free:
                        if free or other == run:
                            _told(other, record.tag, scheduler, array_id, now)
    return Record.load(run.record)


def _told(run: RunDirectory, tag: str, scheduler: Scheduler, array_id: str, now: float) -> None:
    """Note the id of a run of an array, unless it has one."""
    with suppress(DataFileError):
        record = Record.load(run.record)
        if record.job_id is None and record.tag == tag and record.task is not None:
            job_id = scheduler.task_id(array_id, record.task)
            record.after(now, "submitted", job_id=job_id, detail="found by its tag").save(
                run.record
            )


def continued(run: RunDirectory, record: Record, now: float) -> Record:
    """The record after what the job script submitted, if it did; else the same.

    Who asks for a job's state looks here afterwards, since a script submits just before it ends.
    """
    job_id = _next_job(run)
    if job_id in {None, record.job_id}:
        return record
    return record.after(now, "submitted", job_id=job_id, detail=f"{job_id}, by its own script")


def _next_job(run: RunDirectory) -> str | None:
    """The job that the script submitted, if it did."""
    try:
        text = read_limited(run.resubmitted, _LINE).decode()
    except (OSError, ValueError):
        return None
    words = text.split()
    return words[-1] if words and is_job_id(words[-1]) else None


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
        cure=f"follow it with `pipectl status {as_typed(run)}`, or end it with `pipectl cancel`; "
        "for another run beside it, submit again",
    )
