"""Runs that only measure: of a model's operators, or of the links between ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import JobRequest
from pipectl.errors import UsageError
from pipectl.files import is_stream, make_directory_of
from pipectl.jobs.submit import Submission, hand_over
from pipectl.jobs.template import write_private
from pipectl.runs import PROFILING, Record, RunDirectory
from pipectl.spec import dump

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
    run: RunDirectory, spec: JobSpec, request: JobRequest, scheduler: str, now: float
) -> Submission:
    """Submit it; see :func:`pipectl.jobs.submit.hand_over`.

    Args:
        scheduler: its name.
        now: seconds since the epoch.
    """
    record = Record(
        name=request.name,
        scheduler=scheduler,
        tag=request.tag,
        submitted_at=now,
        ranks=request.ranks,
        nodes=request.node_count,
        steps=PERCENT,
        kind=PROFILING,
    )
    submitted = hand_over(run, request, record, lambda: write_private(run.job, dump(spec)))
    return Submission(run, submitted, None)
