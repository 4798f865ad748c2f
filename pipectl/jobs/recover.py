"""Find jobs that the record of a run lacks.

A record has no job id if the submission was interrupted after the batch system got the job, which
is then found by its tag. It has an old one if the job script submitted itself again, as on PBS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from pipectl.batch import get_scheduler
from pipectl.batch.process import TIMEOUT_S
from pipectl.errors import PipectlError, SchedulerError, UsageError
from pipectl.files import fault_of_owner, read_limited
from pipectl.runs import Record, RunDirectory, is_job_id, list_runs, locked, name_in_shell

BY_TAG = "found by its tag"
_MAX_RUNS = 10
"""Maximum number of runs with the same name that are checked, newest first."""
_RECENT_S = 86400.0
"""Age of unconfirmed submissions that stop another one while the batch system does not answer."""
_MAX_BYTES = 1000
_FILES_ONLY: Mapping[str, str] = {}


def recover(
    run: RunDirectory,
    now: float,
    *,
    is_locked: bool = False,
    found: Mapping[str, str] | None = None,
) -> Record:
    """The record of a run, with the id of its current job.

    The record is not saved while another command holds the run, or if the run belongs to another
    user.

    Args:
        is_locked: whether the caller holds the lock of the run.
        found: jobs by tag, from :func:`find_jobs`; None to ask the batch system, and empty if only
            files count.

    Raises:
        DataFileError: there is no record, or it is damaged.
        SchedulerError: the batch system cannot be asked.
    """
    record = Record.load(run.record)
    newer = add_next_job(run, record, now)
    may_be_found = found is None or record.tag in found
    if newer is record and not (may_be_found and record.is_unsure):
        return record
    if not is_locked:
        if fault_of_owner(run.path, root=False) is not None:
            return newer
        with locked(run, wait=False) as ours:
            if not ours:
                return record
            return recover(run, now, is_locked=True, found=found)
    if newer is record:
        found = find_jobs([record]) if found is None else found
        if record.tag not in found:
            return record
        job_id = found[record.tag]
        if record.task is not None:
            job_id = get_scheduler(record.scheduler).task_id(job_id, record.task)
        newer = record.with_state(now, "submitted", job_id=job_id, detail=BY_TAG)
    with suppress(UsageError):  # the next command finds the job in the same way
        newer.save(run.record)
    return newer


def recover_from_files(run: RunDirectory, now: float) -> Record:
    """See :func:`recover`; the batch system is not asked."""
    return recover(run, now, found=_FILES_ONLY)


def find_jobs(records: Iterable[Record], timeout_s: float = TIMEOUT_S) -> dict[str, str]:
    """Ids by tag of the jobs of submissions that nobody confirmed; of arrays, the array's.

    Each batch system, and each choice of its clusters, is asked once.

    Args:
        timeout_s: time limit of each question.

    Raises:
        SchedulerError: a batch system cannot be asked.
    """
    places: dict[tuple[str, str], set[str]] = {}
    for record in records:
        if record.is_unsure:
            places.setdefault((record.scheduler, record.clusters), set()).add(record.tag)
    found: dict[str, str] = {}
    for (name, clusters), tags in places.items():
        found.update(get_scheduler(name, timeout_s).find_all(tags, clusters))
    return found


def add_next_job(run: RunDirectory, record: Record, now: float) -> Record:
    """The record with the job that the job script submitted; the same record if there is none.

    A script submits just before it ends, so call this after the query for the state of its job.
    """
    text = ""
    for start in run.every_start():
        if start.number > record.earlier_starts:  # since this submission
            with suppress(OSError, ValueError):
                text = read_limited(start.resubmitted, _MAX_BYTES).decode()
                break
    # A site may print more.
    lines = map(str.strip, text.splitlines())
    ids = [line for line in lines if is_job_id(line) and line[0].isdigit()]
    if not ids or ids[-1] == record.job_id:
        return record
    detail = f"{ids[-1]}, by its own script"
    return record.with_state(now, "submitted", job_id=ids[-1], detail=detail)


def refuse_duplicate(base: Path, name: str, scheduler: str, now: float) -> None:
    """Raise if an earlier submission of a job was interrupted after it reached the queue.

    This raises once per run, because it completes the run's record.

    Args:
        scheduler: of the job that is to be submitted.

    Raises:
        UsageError: naming the run.
        SchedulerError: the batch system does not say whether it has the job.
    """
    unsure = _find_unsure(base, name)
    try:
        found = find_jobs(unsure.values())
    except SchedulerError as error:
        for run, record in unsure.items():
            if record.scheduler == scheduler and now - record.submitted_at < _RECENT_S:
                raise SchedulerError(
                    f"{run.name}: it is not known whether this submission of the same job reached "
                    f"the queue: {error.message}",
                    hint=f"try again in a minute; if you know that it did not: rm -r {run.path}",
                ) from None
        return
    newest = None
    for run in unsure:
        with suppress(PipectlError):
            record = recover(run, now, found=found)
            # Any other detail is of a concurrent submission that has just recorded its id.
            if BY_TAG in {event.detail for event in record.history[-1:]}:
                newest = newest or (run, record)
    if newest is not None:
        run, record = newest
        raise UsageError(
            f"{run.name}: its submission was interrupted, but it is {record.scheduler} job "
            f"{record.job_id}; nothing new was submitted",
            hint=f"follow it with `pipectl status {name_in_shell(run)}`, or end it with "
            "`pipectl cancel`; for one more run, submit again",
        )


def _find_unsure(base: Path, name: str) -> dict[RunDirectory, Record]:
    """Those of the newest runs of a job, newest first, whose submission nobody confirmed."""
    unsure: dict[RunDirectory, Record] = {}
    count = 0
    for run in reversed(list_runs(base)):
        if not run.name.split("-", 2)[2].startswith(name):  # names may have a number at the end
            continue
        with suppress(PipectlError):  # an old run does not stop a new job
            record = Record.load(run.record)
            if record.name == name:
                count += 1
                if record.is_unsure and fault_of_owner(run.path, root=False) is None:
                    unsure[run] = record
        if count == _MAX_RUNS:
            break
    return unsure
