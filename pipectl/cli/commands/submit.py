"""`pipectl submit`: run the job, here or on a batch system."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli.console import note, say, say_json, short, warn
from pipectl.cli.interruption import resumable
from pipectl.cli.options import JobFile, Json, Overrides, SchedulerOption, names_of_runs
from pipectl.cli.progress import progress_bar
from pipectl.cli.refusal import choose_one, refuse
from pipectl.cli.rehearse import rehearse
from pipectl.cli.submit_script import NO_PROFILE, forecast, print_script, tell_launch
from pipectl.cli.submit_sweep import submit_points
from pipectl.cli.submitted import answer, follow_to_the_end, tell_plan
from pipectl.runs import as_typed

if TYPE_CHECKING:
    from pipectl.jobs.submit import Submission
    from pipectl.spec import JobSpec


_DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the script.")]
_TestOnly = Annotated[bool, typer.Option("--test-only", help="Only ask when it would start.")]
_Wait = Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")]
_Rehearse = Annotated[
    bool, typer.Option("--rehearse", help="Wait instead of computing; on this machine by default.")
]
_After = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RUN",
        help="Start when that run, or sweep, has completed.",
        autocompletion=names_of_runs,
    ),
]


def command(
    job: JobFile,
    dry_run: _DryRun = False,
    test_only: _TestOnly = False,
    wait: _Wait = False,
    rehearsal: _Rehearse = False,
    after: _After = None,
    scheduler: SchedulerOption = None,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    """Run a job, profiling and planning it where needed."""
    from pipectl.jobs.trust import warning_of_code
    from pipectl.spec import load_sweep

    choose_one(dry_run=dry_run, test_only=test_only, rehearse=rehearsal)
    if dry_run or test_only:
        _check_looking(wait=wait, after=after, as_json=as_json)
    if rehearsal:
        refuse({"--after": after}, "a rehearsal waits for no other run", cure="leave it out")
    spec, points = load_sweep(job, overrides or ())
    warn(warning_of_code(spec, job))
    name = None if scheduler is None else scheduler.value
    if dry_run:
        print_script(spec, points, name)
    elif test_only:
        say(forecast(spec, points, name))
    elif rehearsal:
        rehearse(spec, name, wait=wait, as_json=as_json)
    elif points:
        submit_points(spec, points, name, after or (), wait=wait, as_json=as_json)
    else:
        _submit(spec, name, after or (), wait=wait, as_json=as_json)


def _check_looking(*, wait: bool, after: Sequence[str] | None, as_json: bool) -> None:
    """What has a meaning only where something is submitted."""
    refuse({"--json": as_json}, "--dry-run and --test-only print text", cure="leave it out")
    why = "--dry-run and --test-only submit nothing"
    refuse({"--wait": wait, "--after": after}, why, cure="leave it out")


def _submit(
    spec: JobSpec, scheduler: str | None, after: Sequence[str], *, wait: bool, as_json: bool
) -> None:
    from pipectl.cli.profile_view import tell_origin
    from pipectl.jobs.plan import coupling_warning
    from pipectl.jobs.submit import gather, submit
    from pipectl.runs import find_runs

    before = find_runs(Path(spec.output.directory), after)
    with resumable(), progress_bar("profiling") as progress:
        inputs = gather(spec, scheduler, progress)
    if inputs.measurement is not None:
        tell_origin(inputs.measurement, time.time(), "pipectl profile --again measures anew")
    warn(inputs.warning)
    if inputs.profile is not None:
        warn(coupling_warning(spec, inputs.profile))
    if inputs.launch is not None:
        tell_launch(inputs.launch)
    submission = submit(inputs, time.time(), before)
    if not as_json:
        _tell(submission)
    if wait:
        follow_to_the_end(submission.run, as_json=as_json)
    elif as_json:
        say_json(answer(submission.run, submission.record))


def _tell(submission: Submission) -> None:
    if submission.plan is None:
        note(NO_PROFILE)
    else:
        tell_plan(submission.plan)
    record = submission.record
    say(f"submitted: {record.name} ({record.scheduler} job {record.job_id})")
    say(f"run directory: {short(submission.run.path)}")
    say(f"see: pipectl status {as_typed(submission.run)}")
