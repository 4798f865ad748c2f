"""What must stay as it was when a run goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipectl.errors import UsageError
from pipectl.jobs.places import scheduler_name
from pipectl.runs import Record, RunDirectory

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


def check_unchanged(run: RunDirectory, record: Record, was: JobSpec, spec: JobSpec) -> None:
    """Refuse what a run cannot go on with.

    Args:
        was, spec: its job so far, and as it is to go on.

    Raises:
        UsageError: another batch system, whose jobs the record does not name.
    """
    asked = spec.launch.scheduler
    if asked != was.launch.scheduler and scheduler_name(spec, None) != record.scheduler:
        raise UsageError(
            f"{run.name}: was submitted to {record.scheduler} and goes on there, not on {asked} "
            "(launch.scheduler)",
            cure=f"leave it out, or submit a new run: pipectl submit {run.job} --scheduler {asked}",
        )
