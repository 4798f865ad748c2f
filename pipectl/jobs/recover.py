"""Find jobs that the record of a run lacks.

A record has no job id if the submission was interrupted after the batch system got the job, which
is then found by its tag. It has an old one if the job script submitted itself again, as on PBS.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pipectl.batch import get_scheduler
from pipectl.batch.process import TIMEOUT_S
from pipectl.errors import PipectlError, UsageError
from pipectl.files import fault_of_owner, read_limited
from pipectl.runs import Record, RunDirectory, is_job_id, list_runs, locked, name_in_shell

BY_TAG = "found by its tag"
_MAX_RUNS = 10
"""Maximum number of runs with the same name that are checked, newest first."""
_MAX_BYTES = 1000
_ARRAYS: dict[tuple[Path, str], str] = {}
"""Ids of job arrays by the directory of their runs and their tag."""


def recover(
    run: RunDirectory,
    now: float,
    *,
    is_locked: bool = False,
    search: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Record:
    """The record of a run, with the id of its current job.

    The record is not saved while another command holds the run, or if the run belongs to another
    user.

    Args:
        is_locked: whether the caller holds the lock of the run.
        search: whether to ask the batch system for a job with the tag; otherwise only files count.
        timeout_s: time limit of that question.

    Raises:
        DataFileError: there is no record, or it is damaged.
        SchedulerError: the batch system cannot be asked.
    """
    record = Record.load(run.record)
    newer = add_next_job(run, record, now)
    if newer is record and not (search and record.job_id is None):
        return record
    if not is_locked:
        if fault_of_owner(run.path, root=False) is not None:
            return newer
        with locked(run, wait=False) as ours:
            if not ours:
                return record
            return recover(run, now, is_locked=True, search=search, timeout_s=timeout_s)
    is_unsure = newer is record and record.state == "submitting"
    if is_unsure and (job_id := _find(run, record, timeout_s)) is not None:
        newer = record.with_state(now, "submitted", job_id=job_id, detail=BY_TAG)
    if newer is not record:
        with suppress(UsageError):  # the next command finds the job in the same way
            newer.save(run.record)
    return newer


def _find(run: RunDirectory, record: Record, timeout_s: float) -> str | None:
    """The id of the job with the record's tag; an array is looked up once for all its runs."""
    scheduler = get_scheduler(record.scheduler, timeout_s)
    if record.task is None:
        return scheduler.find(record.tag)
    key = run.path.parent, record.tag
    if key not in _ARRAYS and (array_id := scheduler.find(record.tag)) is not None:
        _ARRAYS[key] = array_id
    return scheduler.task_id(_ARRAYS[key], record.task) if key in _ARRAYS else None


def add_next_job(run: RunDirectory, record: Record, now: float) -> Record:
    """The record with the job that the job script submitted; the same record if there is none.

    A script submits just before it ends, so call this after the query for the state of its job.
    """
    lines: list[str] = []
    with suppress(OSError, ValueError):
        lines = read_limited(run.resubmitted, _MAX_BYTES).decode().splitlines()
    # A site may print more.
    ids = [line for line in map(str.strip, lines) if is_job_id(line) and line[0].isdigit()]
    if not ids or ids[-1] == record.job_id:
        return record
    detail = f"{ids[-1]}, by its own script"
    return record.with_state(now, "submitted", job_id=ids[-1], detail=detail)


def refuse_duplicate(base: Path, name: str, now: float) -> None:
    """Raise if an earlier submission of a job was interrupted after it reached the queue.

    This raises once per run, because it completes the run's record.

    Raises:
        UsageError: naming the run.
    """
    newest, count = None, 0
    for run in reversed(list_runs(base)):
        if not run.name.split("-", 2)[2].startswith(name):  # names may have a number at the end
            continue
        with suppress(PipectlError):  # an old run does not stop a new job
            record = Record.load(run.record)
            if record.name == name:
                count += 1
                if record.job_id is None:
                    record = recover(run, now)
                    # Any other detail is of a concurrent submission that has just recorded its id.
                    if BY_TAG in {event.detail for event in record.history[-1:]}:
                        newest = newest or (run, record)
        if count == _MAX_RUNS:
            break
    if newest is not None:
        run, record = newest
        raise UsageError(
            f"{run.name}: its submission was interrupted, but it is {record.scheduler} job "
            f"{record.job_id}; nothing new was submitted",
            cure=f"follow it with `pipectl status {name_in_shell(run)}`, or end it with "
            "`pipectl cancel`; for one more run, submit again",
        )
