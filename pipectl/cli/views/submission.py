"""What is said of a job that is submitted: its launcher, its plan, and where the run is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pipectl.batch import MpiChoice
from pipectl.cli.console import note, say, warn
from pipectl.runs import Record, RunDirectory, SweepDirectory, as_typed

if TYPE_CHECKING:
    from pipectl.jobs.job import Job


def submission_json(run: RunDirectory, record: Record, **more: Any) -> dict[str, Any]:
    """For programs: where a run is."""
    return {
        "run": run.name,
        "directory": str(run.path),
        "scheduler": record.scheduler,
        "job_id": record.job_id,
        **more,
    }


def print_submission(run: RunDirectory | SweepDirectory, what: str, *lines: str) -> None:
    """Say what the batch system has now, and how to follow it.

    Args:
        what: ``submitted: gpt (slurm job 36)``; ``lines`` come after it.
    """
    for line in (what, *lines, f"see: pipectl status {as_typed(run)}"):
        say(line)


def job_of(record: Record) -> str:
    """``slurm job 36``."""
    return f"{record.scheduler} job {record.job_id}"


def print_launch(launch: MpiChoice, warning: str) -> None:
    """Say what ranks are started with, if somebody would ask.

    Args:
        warning: about the machines; empty if all is well.
    """
    warn(warning)
    if launch.reason:
        note(launch.reason)
    warn(launch.warning)


def print_plan(jobs: Sequence[Job], before: str = "", tell: Callable[[str], None] = say) -> None:
    """What runs, and how fast it should be; or that a model has yet to be measured.

    Args:
        before: begins the line of a plan.
        tell: prints it; plans of several jobs are not printed.
    """
    missing = sum(job.plan is None for job in jobs)
    if missing:
        of = "" if len(jobs) == 1 else f" for {missing} of {len(jobs)} runs"
        where = ", in the job's allocation" if any(job.prepares for job in jobs) else ""
        note(f"no fresh profile{of}: the model is measured before it is trained{where}")
    elif len(jobs) == 1 and (plan := jobs[0].plan) is not None:
        from pipectl.cli.views.plan import prediction_lines

        for line in (f"{before}{plan.name}: {plan.summary}", *prediction_lines(plan)):
            tell(line)
