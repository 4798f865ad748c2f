"""`pipectl submit`: run the job, or all jobs of its sweep, here or on a batch system."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.batch import LOCAL, get_scheduler
from pipectl.cli.console import note, say, say_json, short_path, warn
from pipectl.cli.options import (
    JobFile,
    Json,
    Overrides,
    SchedulerOption,
    Wait,
    names_of_runs,
    read_walltime,
    refuse,
)
from pipectl.cli.views.submission import (
    describe_job,
    print_mpi_choice,
    print_plan,
    print_submission,
    submission_json,
)
from pipectl.errors import UsageError
from pipectl.jobs.job import render, warning_of_code
from pipectl.jobs.places import coupling_warning, plan_path, profile_path, scheduler_name
from pipectl.jobs.prepare import prepare
from pipectl.runs import RunDirectory, SweepDirectory, find_runs
from pipectl.spec import JobSpec, Point, load_sweep

if TYPE_CHECKING:
    from pipectl.jobs.job import Job
    from pipectl.jobs.submit import Submission


def command(
    job: JobFile,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job script; do not submit.")
    ] = False,
    test_only: Annotated[
        bool,
        typer.Option("--test-only", help="Ask the scheduler for the start time; do not submit."),
    ] = False,
    wait: Wait = False,
    after: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN",
            help="Start after RUN has completed.",
            autocompletion=names_of_runs,
        ),
    ] = None,
    scheduler: SchedulerOption = None,
    partition: Annotated[
        str | None,
        typer.Option(
            "-p", "--partition", metavar="NAME", help="Slurm partition (slurm.partition)."
        ),
    ] = None,
    queue: Annotated[
        str | None, typer.Option("-q", "--queue", metavar="NAME", help="PBS queue (pbs.queue).")
    ] = None,
    account: Annotated[
        str | None,
        typer.Option(
            "-A",
            "--account",
            metavar="NAME",
            help="Account to charge (slurm.account or pbs.account).",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "-N", "--nodes", metavar="N", min=1, help="Number of nodes (resources.nodes)."
        ),
    ] = None,
    walltime: Annotated[
        int | None,
        typer.Option(
            *("-t", "--time"),
            parser=read_walltime,
            metavar="TIME",
            help="Time limit; a number alone is minutes (resources.walltime).",
        ),
    ] = None,
    gres: Annotated[
        str | None,
        typer.Option(
            metavar="GRES",
            help="gpu:N sets resources.gpus_per_node; other values set slurm.options.gres.",
        ),
    ] = None,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    if dry_run and test_only:
        raise UsageError("--dry-run and --test-only: choose one")
    if dry_run or test_only:
        only, cure = "--dry-run and --test-only", "leave it out"
        refuse({"--json": as_json}, f"{only} print text", cure=cure)
        refuse({"--wait": wait, "--after": after}, f"{only} submit nothing", cure=cure)
    gpus = re.fullmatch(r"gpu(?::([0-9]+))?", gres or "")
    options: dict[str, dict[str, str | int | None]] = {  # with the keys that each sets
        "--nodes": {"resources.nodes": nodes},
        "--time": {"resources.walltime": None if walltime is None else f"{walltime}s"},
        "--gres": {"slurm.options.gres": gres},
        "--partition": {"slurm.partition": partition},
        "--queue": {"pbs.queue": queue},
        "--account": {"slurm.account": account, "pbs.account": account},
    }
    if gpus:
        options["--gres"] = {"resources.gpus_per_node": int(gpus[1] or 1)}
    settings = [
        f"{key}={json.dumps(value, ensure_ascii=False)}"
        for keys in options.values()
        for key, value in keys.items()
        if value is not None
    ]
    spec, points = load_sweep(job, [*settings, *(overrides or ())])  # --set has precedence
    name = None if scheduler is None else scheduler.value
    batch_system = scheduler_name(spec, name)
    for option, keys in options.items():
        sections = {key.partition(".")[0] for key in keys}
        if not sections & {"resources", batch_system}:
            why = f"is not used with {batch_system}"
            refuse({option: next(iter(keys.values()))}, why, cure="leave it out")
    warn(warning_of_code(spec, job))
    if dry_run:
        _print_script(spec, points, name)
    elif test_only:
        from pipectl.jobs.submit import estimate

        first, script, array_script = _render_scripts(spec, points, name)
        forecast = "the scheduler gives no start time (without a queue, jobs start at once)"
        say(estimate(array_script or script, first.scheduler) or f"the job is valid; {forecast}")
    else:
        _submit(spec, points, name, after or (), wait=wait, as_json=as_json)


def _submit(
    spec: JobSpec,
    points: Sequence[Point],
    scheduler: str | None,
    after: Sequence[str],
    *,
    wait: bool,
    as_json: bool,
) -> None:
    """Submit a job, or one run per point of its sweep.

    Args:
        spec: the job, without the values of its sweep.
        after: names of the runs to wait for.
    """
    # A dry run does not import these.
    from pipectl.cli.follow import follow_or_exit
    from pipectl.cli.progress import profiling_progress
    from pipectl.cli.views.profile import note_origin
    from pipectl.cli.views.run import print_run
    from pipectl.jobs.submit import submit, submit_sweep

    runs_before = find_runs(Path(spec.output.directory), after)
    with profiling_progress() as progress:
        jobs = prepare(spec, scheduler, progress, points=points)
    job = jobs[0]
    if job.measurement is not None and not points:
        note_origin(job.measurement, time.time(), "use `pipectl profile --again` to measure again")
    for choice, warning in dict.fromkeys((job.mpi_choice, job.warning) for job in jobs):
        print_mpi_choice(choice, warning)
    profiled = [(job.spec, job.profile) for job in jobs if job.profile is not None]
    for text in dict.fromkeys(coupling_warning(*each) for each in profiled):
        warn(text)
    now = time.time()
    directory: RunDirectory | SweepDirectory
    if points:
        at_once = None if spec.sweep is None else spec.sweep.at_once
        directory, submissions = submit_sweep(points, jobs, at_once, now, runs_before)
    else:
        submissions = (submit(job, now, runs_before),)
        directory = submissions[0].run
    if not as_json:
        print_plan(jobs)
        _print_submitted(directory, submissions)
    if wait and isinstance(directory, SweepDirectory):
        _follow_sweep(directory, as_json=as_json)
    elif wait:
        print_run(follow_or_exit(submissions[0].run, as_json=as_json), as_json=as_json)
    elif as_json:
        answers = [submission_json(each.run, each.record) for each in submissions]
        for answer, point in zip(answers, points, strict=False):
            answer |= {"sweep": directory.name, "values": dict(point.values)}
        say_json(answers if points else answers[0])


def _print_submitted(
    directory: RunDirectory | SweepDirectory, submissions: Sequence[Submission]
) -> None:
    record = submissions[0].record
    what, kind = f"{record.name} ({describe_job(record)})", "run"
    if isinstance(directory, SweepDirectory):
        array = get_scheduler(record.scheduler).array_id(record.job_id or "")
        of = "" if record.scheduler == LOCAL else f" ({record.scheduler} job {array})"
        what, kind = f"{len(submissions)} runs of {record.name}{of}", "sweep"
    line = f"{kind} directory: {short_path(directory.path)}"
    print_submission(directory, f"submitted: {what}", line)


def _follow_sweep(sweep: SweepDirectory, *, as_json: bool) -> None:
    """Follow the runs of a sweep one after the other.

    Raises:
        typer.Exit: with the code of the first run that failed.
    """
    from pipectl.cli.follow import exit_code, follow
    from pipectl.cli.views.run import print_sweep
    from pipectl.jobs.state import get_statuses

    codes = []
    for run in sweep.runs():
        note(run.name)
        codes.append(exit_code(follow(run)))
    print_sweep(sweep, get_statuses(sweep.runs(), time.time()), as_json=as_json)
    if code := next(filter(None, codes), 0):
        raise typer.Exit(code)


def _print_script(spec: JobSpec, points: Sequence[Point], scheduler: str | None) -> None:
    """Print the job script and its plan; for a sweep, the script of its array first."""
    job, script, array_script = _render_scripts(spec, points, scheduler)
    if array_script:
        sys.stdout.write(array_script)
        note("\nEach task of the array runs the script of its run. The first one is:\n")
    print_mpi_choice(job.mpi_choice, job.warning)
    if job.plan is None and job.profile is not None:
        note(f"no fresh plan: submit makes one, of {profile_path(job.spec)}")
    else:
        print_plan([job], before=f"plan: {plan_path(job.spec)}: ", tell=note)
    sys.stdout.write(script)


def _render_scripts(
    spec: JobSpec, points: Sequence[Point], scheduler: str | None
) -> tuple[Job, str, str]:
    """The job, or the first one of a sweep, its script, and the script of the sweep's array.

    The script of the array is empty for a single job.
    """
    now = time.time()
    (job,) = prepare(spec, scheduler, points=points[:1], make_missing=False)
    if spec.sweep is None:
        return job, render(job, now), ""
    from pipectl.jobs.submit import render_array

    return job, render(job, now, "-0"), render_array(job, len(points), spec.sweep.at_once, now)
