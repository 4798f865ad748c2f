"""`pipectl submit`: run the job, here or on a batch system."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli.console import note, say, say_json, short
from pipectl.cli.interruption import resumable
from pipectl.cli.options import JobFile, Json, Overrides, SchedulerOption, names_of_runs
from pipectl.cli.progress import progress_bar
from pipectl.cli.rehearse import rehearse
from pipectl.cli.submit_script import forecast, print_script, tell_launch
from pipectl.cli.submit_sweep import runs_named, submit_points

if TYPE_CHECKING:
    from pipectl.jobs.submit import Submission
    from pipectl.runs import RunDirectory
    from pipectl.spec import JobSpec

_NO_FORECAST = "the job is valid; the scheduler forecasts no start (without a queue, it is at once)"


def command(
    job: JobFile,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the script.")] = False,
    test_only: Annotated[
        bool, typer.Option("--test-only", help="Only ask when it would start.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
    rehearsal: Annotated[
        bool,
        typer.Option("--rehearse", help="Wait instead of computing; on this machine by default."),
    ] = False,
    after: Annotated[
        list[str] | None,
        typer.Option(
            "--after",
            metavar="RUN",
            help="Start when that run, or sweep, has completed.",
            autocompletion=names_of_runs,
        ),
    ] = None,
    scheduler: SchedulerOption = None,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    """Run a job, profiling and planning it where needed."""
    from pipectl.spec import load_sweep

    spec, points = load_sweep(job, overrides or ())
    name = None if scheduler is None else scheduler.value
    if dry_run:
        print_script(spec, points, name)
    elif test_only:
        say(forecast(spec, points, name) or _NO_FORECAST)
    elif rehearsal:
        rehearse(spec, name, wait=wait, as_json=as_json)
    elif points:
        submit_points(spec, points, name, after or (), wait=wait, as_json=as_json)
    else:
        _submit(spec, name, after or (), wait=wait, as_json=as_json)


def _submit(
    spec: JobSpec, scheduler: str | None, after: Sequence[str], *, wait: bool, as_json: bool
) -> None:
    from pipectl.cli.profile_view import tell_origin
    from pipectl.jobs.submit import gather, submit

    before = runs_named(Path(spec.output.directory), after)
    with resumable(), progress_bar("profiling") as progress:
        inputs = gather(spec, scheduler, progress)
    if inputs.measurement is not None:
        tell_origin(inputs.measurement, time.time(), "pipectl profile --again measures anew")
    if inputs.warning:
        note(f"warning: {inputs.warning}")
    if inputs.launch is not None:
        tell_launch(inputs.launch)
    submission = submit(inputs, time.time(), before)
    if not as_json:
        _tell(submission)
    if wait:
        follow_to_the_end(submission.run, as_json=as_json)
    elif as_json:
        record = submission.record
        answer = {"run": submission.run.name, "directory": str(submission.run.path)}
        say_json({**answer, "scheduler": record.scheduler, "job_id": record.job_id})


def follow_to_the_end(run: RunDirectory, *, as_json: bool) -> None:
    """Show a run until it is over, and exit with its code."""
    from pipectl.cli.follow import exit_code, follow
    from pipectl.cli.status_view import show_run, status_json

    found = follow(run)
    if as_json:
        say_json(status_json(found))
    else:
        show_run(found)
    if code := exit_code(found):
        raise typer.Exit(code)


def _tell(submission: Submission) -> None:
    from pipectl.cli.plan_view import headline, prediction_lines

    if submission.plan is None:
        note("no fresh profile: the job measures the model first, in its allocation")
    else:
        say(headline(submission.plan))
        for line in prediction_lines(submission.plan):
            say(line)
    record = submission.record
    say(f"submitted: {record.name} ({record.scheduler} job {record.job_id})")
    say(f"run directory: {short(submission.run.path)}")
    say(f"see: pipectl status {submission.run.name}")
