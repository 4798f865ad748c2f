"""Jobs that no record names: of interrupted submissions, and those that job scripts submitted."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pipectl.access import is_ours, read_limited
from pipectl.batch import get
from pipectl.errors import DataFileError, PipectlError, UsageError
from pipectl.runs import Record, RunDirectory, as_typed, is_job_id, list_runs, locked, sweep_of

BY_TAG = "found by its tag"
_MAX_RUNS = 10
"""Runs of one name to look at, the newest."""
_MAX_BYTES = 1000


def recover(run: RunDirectory, now: float) -> Record:
    """The record of a run; completed, if its job is not the one that it names.

    That is so if a submission was interrupted, but reached the queue (the job is found by its tag),
    and if a job script submitted itself again, since the batch system requeues none. Nothing is
    changed while another command has the run, or if it is another user's.

    Args:
        now: seconds since the epoch.

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
        return recover_locked(run, now, wait=False) if ours else record


def recover_locked(run: RunDirectory, now: float, *, wait: bool = True) -> Record:
    """What :func:`recover` does, for a caller that has the run.

    Args:
        wait: whether to wait for a command that has the sweep of the run.

    Raises:
        DataFileError: there is no record, or it is damaged.
    """
    record = Record.load(run.record)
    newer = add_next_job(run, record, now)
    if newer is not record:
        with suppress(UsageError):  # it is read from the same file the next time
            newer.save(run.record)
        return newer
    if record.job_id is not None or record.state != "submitting":
        return record
    if record.task is not None and record.sweep is not None:
        return _recover_array(run, record, record.sweep.name, now, wait=wait)
    with suppress(PipectlError):
        job_id = get(record.scheduler).find(record.tag)
        if job_id is not None:
            record = record.after(now, "submitted", job_id=job_id, detail=BY_TAG)
            record.save(run.record)
    return record


def _recover_array(
    run: RunDirectory, record: Record, sweep: str, now: float, *, wait: bool
) -> Record:
    """The record of a run of a sweep; all of its runs get their ids, with one question."""
    directory = sweep_of(run, sweep)
    with locked(directory, wait=wait) as ours, suppress(PipectlError):
        if ours and Record.load(run.record).job_id is None:
            scheduler = get(record.scheduler)
            array_id = scheduler.find(record.tag)
            for other in () if array_id is None else directory.runs():
                with locked(other, wait=False) as free, suppress(DataFileError):
                    if not free and other != run:
                        continue
                    one = Record.load(other.record)
                    if one.job_id is None and one.tag == record.tag and one.task is not None:
                        job_id = scheduler.task_id(array_id or "", one.task)
                        one = one.after(now, "submitted", job_id=job_id, detail=BY_TAG)
                        one.save(other.record)
    return Record.load(run.record)


def add_next_job(run: RunDirectory, record: Record, now: float) -> Record:
    """The record with the job that the job script submitted, if it did; else the same.

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
    """Raise if an earlier submission of a job was interrupted, but is in the queue.

    It is raised once: the run's record is complete from then on.

    Raises:
        UsageError: naming the run.
    """
    count = 0
    for run in reversed(list_runs(base)):
        if not run.name.split("-", 2)[2].startswith(name):  # names may have a number at the end
            continue
        with suppress(DataFileError):
            record = Record.load(run.record)
            if record.name != name:
                continue
            count += 1
            if record.job_id is None and (record := recover(run, now)).job_id is not None:
                raise UsageError(
                    f"{run.name}: was interrupted while it was submitted, and is "
                    f"{record.scheduler} job {record.job_id}; nothing was submitted now",
                    cure=f"follow it with `pipectl status {as_typed(run)}`, or end it with "
                    "`pipectl cancel`; for another run beside it, submit again",
                )
        if count == _MAX_RUNS:
            return
