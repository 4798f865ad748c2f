"""What is printed of jobs before they are submitted, and of runs that were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pipectl.cli.console import note, say, warn
from pipectl.jobs.prepare import Job
from pipectl.runs import Record, RunDirectory, SweepDirectory, as_typed

if TYPE_CHECKING:  # a dry run measures nothing
    from pipectl.jobs.profiles import Measurement


def submission_json(run: RunDirectory, record: Record, **more: Any) -> dict[str, Any]:
    """The JSON of a run that was submitted; ``more`` adds keys."""
    return {
        "run": run.name,
        "directory": str(run.path),
        "scheduler": record.scheduler,
        "job_id": record.job_id,
        **more,
    }


def print_submission(run: RunDirectory | SweepDirectory, what: str, *lines: str) -> None:
    """Print what was submitted, and the command that shows its status.

    Args:
        what: the first line, such as ``submitted: gpt (slurm job 36)``; ``lines`` follow it.
    """
    for line in (what, *lines, f"see: pipectl status {as_typed(run)}"):
        say(line)


def describe_job(record: Record) -> str:
    """``slurm job 36``."""
    return f"{record.scheduler} job {record.job_id}"


def print_notes(jobs: Sequence[Job]) -> None:
    """Print the warnings of jobs, and the choice of MPI if it needs an explanation, once each."""
    for choice, warning in dict.fromkeys((job.mpi_choice, job.warning) for job in jobs):
        warn(warning)
        if choice.reason:
            note(choice.reason)
        warn(choice.warning)


def print_plan(jobs: Sequence[Job], before: str = "", tell: Callable[[str], None] = say) -> None:
    """Print the plan of a single job and its prediction, or that models are measured first.

    Args:
        before: text before the name of the plan.
        tell: prints a line of the plan.
    """
    missing = sum(job.plan is None for job in jobs)
    if missing:
        of = "" if len(jobs) == 1 else f" for {missing} of {len(jobs)} runs"
        where = ", in the job's allocation" if any(job.plans_in_job for job in jobs) else ""
        note(f"no up-to-date profile{of}: the model is measured before it is trained{where}")
    elif len(jobs) == 1 and (plan := jobs[0].plan) is not None:
        from pipectl.cli.views.plan import prediction_lines

        for line in (f"{before}{plan.name}: {plan.summary}", *prediction_lines(plan)):
            tell(line)


def note_origin(measurement: Measurement, now: float, again: str) -> None:
    """Note that a profile, or a part of it, is not from now.

    Args:
        again: how to measure all of it.
    """
    if measurement.cached:
        device = measurement.profile.device
        model = device.model if device else "another device"
        when = ago(now - measurement.measured_at)
        note(f"cached: measured {when} on {measurement.host} ({model}); {again}")
    elif measurement.resumed:
        note(f"{measurement.resumed} measurements are from an interrupted attempt")


def ago(age_s: float) -> str:
    """``3 h ago``; in the largest unit that fits."""
    for span_s, unit in ((86400, "day"), (3600, "h"), (60, "min")):
        count = int(age_s // span_s)
        if count > 0:
            return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''} ago"
    return "just now"
