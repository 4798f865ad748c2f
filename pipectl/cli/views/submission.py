"""What commands say of a run that was submitted, and waiting for its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from pipectl.cli.console import note, say, warn
from pipectl.runs import as_typed

if TYPE_CHECKING:
    from pipectl.batch import MpiChoice
    from pipectl.jobs.state import RunStatus
    from pipectl.plan import Plan
    from pipectl.runs import Record, RunDirectory

NO_PROFILE = "no fresh profile: the job measures the model first, in its allocation"


def submission_json(run: RunDirectory, record: Record, **more: Any) -> dict[str, Any]:
    """For programs: where a run is."""
    return {
        "run": run.name,
        "directory": str(run.path),
        "scheduler": record.scheduler,
        "job_id": record.job_id,
        **more,
    }


def print_launch(launch: MpiChoice | None, warning: str) -> None:
    """Say what ranks are started with, if somebody would ask.

    Args:
        warning: about the machines; empty if all is well.
    """
    warn(warning)
    if launch is not None:
        if launch.reason:
            note(launch.reason)
        warn(launch.warning)


def print_plan(plan: Plan | None, before: str = "") -> None:
    """What runs, and how fast it should be; or that the job has yet to find out."""
    from pipectl.cli.views.plan import headline, prediction_lines

    if plan is None:
        note(NO_PROFILE)
        return
    say(f"{before}{headline(plan)}")
    for line in prediction_lines(plan):
        say(line)


def print_measuring(run: RunDirectory, record: Record) -> None:
    """The job that measures, and how to see how it is doing."""
    say(f"submitted: {run.name} ({record.scheduler} job {record.job_id})")
    say(f"see: pipectl status {as_typed(run)}")


def follow_to_the_end(run: RunDirectory, *, as_json: bool) -> None:
    """Show a run until it is over, and exit with its code."""
    from pipectl.cli.views.run import print_run

    print_run(wait_for(run, as_json=as_json), as_json=as_json)


def wait_for(run: RunDirectory, *, as_json: bool) -> RunStatus:
    """Follow a run to its end; one that failed is shown and ends the command."""
    from pipectl.cli.follow import exit_code, follow
    from pipectl.cli.views.run import print_run

    status = follow(run)
    if code := exit_code(status):
        print_run(status, as_json=as_json)
        raise typer.Exit(code)
    return status
