"""Find jobs that no record has: of interrupted submissions, or submitted by a job script."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pipectl.access import is_ours, read_limited
from pipectl.batch import get_scheduler
from pipectl.errors import DataFileError, PipectlError, UsageError
from pipectl.runs import Record, RunDirectory, as_typed, is_job_id, list_runs, locked

BY_TAG = "found by its tag"
_MAX_RUNS = 10
"""How many of the newest runs with the same name are checked."""
_MAX_BYTES = 1000
_ARRAYS: dict[tuple[Path, str], str] = {}
"""Ids of the job arrays that were found, by directory of their runs and tag."""


def recover(run: RunDirectory, now: float) -> Record:
    """The record of a run, with the id of its current job.

    The saved record lacks this id if a submission was interrupted, but reached the queue (the job
    is found by its tag), or if the job script submitted itself again, as on PBS. Nothing is saved
    while another command holds the run, or if the run belongs to another user.

    Raises:
        DataFileError: there is no record, or it is damaged.
    """
    record = Record.load(run.record)
    newer = add_next_job(run, record, now)
    if record.job_id is not None and newer is record:
        return record
    if not is_ours(run.path):
        return newer
    with locked(run, wait=False) as ours:
        return recover_locked(run, now) if ours else record


def recover_locked(run: RunDirectory, now: float) -> Record:
    """As :func:`recover`, for a caller that holds the lock of the run.

    Raises:
        DataFileError: there is no record, or it is damaged.
    """
    record = Record.load(run.record)
    newer = add_next_job(run, record, now)
    if newer is record and record.job_id is None and record.state == "submitting":
        with suppress(PipectlError):
            if (job_id := _find(run, record)) is not None:
                newer = record.after(now, "submitted", job_id=job_id, detail=BY_TAG)
    if newer is not record:
        with suppress(UsageError):  # it is found in the same way the next time
            newer.save(run.record)
    return newer


def _find(run: RunDirectory, record: Record) -> str | None:
    """The id of the job with the record's tag; arrays are looked for once for all of their runs."""
    scheduler = get_scheduler(record.scheduler)
    if record.task is None:
        return scheduler.find(record.tag)
    key = run.path.parent, record.tag
    if key not in _ARRAYS and (array_id := scheduler.find(record.tag)) is not None:
        _ARRAYS[key] = array_id
    return scheduler.task_id(_ARRAYS[key], record.task) if key in _ARRAYS else None


def add_next_job(run: RunDirectory, record: Record, now: float) -> Record:
    """The record with the job that the job script submitted; the same record if there is none.

    A script submits just before it ends, so look here after asking for the state of its job.
    """
    words: list[str] = []
    with suppress(OSError, ValueError):
        words = read_limited(run.resubmitted, _MAX_BYTES).decode().split()
    if not words or not is_job_id(words[-1]) or words[-1] == record.job_id:
        return record
    detail = f"{words[-1]}, by its own script"
    return record.after(now, "submitted", job_id=words[-1], detail=detail)


def refuse_duplicate(base: Path, name: str, now: float) -> None:
    """Raise if an earlier submission of a job was interrupted, but reached the queue.

    This raises once per run, since it completes the run's record.

    Raises:
        UsageError: naming the run.
    """
    newest, count = None, 0
    for run in reversed(list_runs(base)):
        if not run.name.split("-", 2)[2].startswith(name):  # names may have a number at the end
            continue
        with suppress(DataFileError):
            record = Record.load(run.record)
            if record.name == name:
                count += 1
                if record.job_id is None and (record := recover(run, now)).job_id is not None:
                    newest = newest or (run, record)
        if count == _MAX_RUNS:
            break
    if newest is not None:
        run, record = newest
        raise UsageError(
            f"{run.name}: was interrupted while it was submitted, and is "
            f"{record.scheduler} job {record.job_id}; nothing was submitted now",
            cure=f"follow it with `pipectl status {as_typed(run)}`, or end it with "
            "`pipectl cancel`; for another run beside it, submit again",
        )
