"""What is said of a run that was handed over, and following it to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from pipectl.cli.console import say
from pipectl.runs import as_typed

if TYPE_CHECKING:
    from pipectl.jobs.status import RunStatus
    from pipectl.plan import Plan
    from pipectl.runs import Record, RunDirectory


def answer(run: RunDirectory, record: Record, **more: Any) -> dict[str, Any]:
    """For programs: where it is."""
    return {
        "run": run.name,
        "directory": str(run.path),
        "scheduler": record.scheduler,
        "job_id": record.job_id,
        **more,
    }


def tell_plan(plan: Plan, before: str = "") -> None:
    """For people: what runs, and how fast it should be."""
    from pipectl.cli.plan_view import headline, prediction_lines

    say(f"{before}{headline(plan)}")
    for line in prediction_lines(plan):
        say(line)


def tell_measuring(run: RunDirectory, record: Record) -> None:
    """For people: the job that measures, and how to see how it is doing."""
    say(f"submitted: {run.name} ({record.scheduler} job {record.job_id})")
    say(f"see: pipectl status {as_typed(run)}")


def follow_to_the_end(run: RunDirectory, *, as_json: bool) -> None:
    """Show a run until it is over, and exit with its code."""
    from pipectl.cli.status_view import show_run

    show_run(completed(run, as_json=as_json), as_json=as_json)


def completed(run: RunDirectory, *, as_json: bool) -> RunStatus:
    """Follow a run to its end; one that failed is shown and ends the command."""
    from pipectl.cli.follow import exit_code, follow
    from pipectl.cli.status_view import show_run

    found = follow(run)
    if code := exit_code(found):
        show_run(found, as_json=as_json)
        raise typer.Exit(code)
    return found
