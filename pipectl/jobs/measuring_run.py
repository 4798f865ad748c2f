"""Runs that only measure: of a model's operators, or of the links between ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import JobRequest
from pipectl.errors import UsageError
from pipectl.files import is_stream, make_directory_of
from pipectl.jobs.prepare import Job
from pipectl.jobs.submit import Rollback, Start, Submission, hand_over, record_of
from pipectl.runs import PROFILING, RunDirectory

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

PERCENT = 100
"""Steps of such a run: it tells its progress in percent."""


def prepare_output(output: Path) -> None:
    """Make the directory of what such a run writes.

    Raises:
        UsageError: it cannot be written, or is no file.
    """
    make_directory_of(output)
    if is_stream(output):
        raise UsageError(f"{output}: is no file, which a job could write", cure="name another: -o")


def submit_measuring(
    spec: JobSpec,
    run: RunDirectory,
    rollback: Rollback,
    request: JobRequest,
    scheduler: str,
    now: float,
) -> Submission:
    """Submit it, for a caller within :func:`pipectl.jobs.submit.new_run`.

    Args:
        scheduler: its name.
        now: seconds since the epoch.
    """
    job = Job(spec, scheduler)
    record = record_of(job, request, now, steps=PERCENT, kind=PROFILING)
    return hand_over([Start(run, job, request, record)], rollback)[0]
