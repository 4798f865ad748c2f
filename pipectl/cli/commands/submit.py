"""`pipectl submit`: run the job, here or on a batch system."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli.console import note, say, say_json, short, warn
from pipectl.cli.interruption import resumable
from pipectl.cli.options import JobFile, Json, Overrides, SchedulerOption, names_of_runs
from pipectl.cli.progress import progress_bar
from pipectl.cli.refusal import choose_one, refuse
from pipectl.cli.views.submission import (
    NO_PROFILE,
    follow_to_the_end,
    print_launch,
    print_plan,
    submission_json,
)
from pipectl.errors import Problem, SpecError
from pipectl.runs import as_typed

if TYPE_CHECKING:
    from pipectl.jobs.sweep import SweepSubmission
    from pipectl.spec import JobSpec, Point


_DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the script.")]
_TestOnly = Annotated[bool, typer.Option("--test-only", help="Only ask when it would start.")]
_Wait = Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")]
_After = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RUN",
        help="Start when that run, or sweep, has completed.",
        autocompletion=names_of_runs,
    ),
]


_Partition = Annotated[
    str | None, typer.Option("-p", "--partition", help="Slurm's partition (slurm.partition).")
]
_Queue = Annotated[str | None, typer.Option("-q", "--queue", help="PBS's queue (pbs.queue).")]
_Account = Annotated[
    str | None, typer.Option("-A", "--account", help="Account to charge (slurm or pbs.account).")
]
_Nodes = Annotated[
    int | None, typer.Option("-N", "--nodes", min=1, help="Nodes (resources.nodes).")
]
_Time = Annotated[
    str | None,
    typer.Option("-t", "--time", help="Time limit, 30 for minutes (resources.walltime)."),
]
_Gres = Annotated[
    str | None,
    typer.Option(help="gpu:N for N GPUs per node (resources.gpus_per_node), else options.gres."),
]


def command(
    job: JobFile,
    dry_run: _DryRun = False,
    test_only: _TestOnly = False,
    wait: _Wait = False,
    after: _After = None,
    scheduler: SchedulerOption = None,
    partition: _Partition = None,
    queue: _Queue = None,
    account: _Account = None,
    nodes: _Nodes = None,
    walltime: _Time = None,
    gres: _Gres = None,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    """Run a job, profiling and planning it first if necessary."""
    from pipectl.jobs.places import scheduler_name
    from pipectl.jobs.prepare import warning_of_code

    choose_one(dry_run=dry_run, test_only=test_only)
    if dry_run or test_only:
        why = "--dry-run and --test-only print text"
        refuse({"--json": as_json}, why, cure="leave it out")
        why = "--dry-run and --test-only submit nothing"
        refuse({"--wait": wait, "--after": after}, why, cure="leave it out")
    gpus = re.fullmatch(r"gpu(?::([0-9]+))?", gres or "")
    options = {
        "resources.nodes": ("--nodes", nodes),
        "resources.walltime": ("--time", walltime),
        "resources.gpus_per_node": ("--gres", int(gpus[1] or 1) if gpus else None),
        "slurm.partition": ("--partition", partition),
        "slurm.account": ("--account", account),
        "slurm.options.gres": ("--gres", None if gpus else gres),
        "pbs.queue": ("--queue", queue),
        "pbs.account": ("--account", account),
    }
    spec, points = _load(job, overrides or (), options)
    name = None if scheduler is None else scheduler.value
    place = scheduler_name(spec, name)
    for_slurm = {"--partition": partition, "--gres": None if gpus else gres}
    elsewhere: dict[str, str | None] = {} if place == "slurm" else for_slurm
    elsewhere |= {} if place == "pbs" else {"--queue": queue}
    elsewhere |= {"--account": account} if place == "local" else {}
    refuse(elsewhere, f"has no meaning for a job that goes to {place}", cure="leave it out")
    warn(warning_of_code(spec, job))
    if dry_run:
        _print_script(spec, points, name)
    elif test_only:
        _print_forecast(spec, points, name)
    elif points:
        _submit_sweep(spec, points, name, after or (), wait=wait, as_json=as_json)
    else:
        _submit(spec, name, after or (), wait=wait, as_json=as_json)


def _load(
    job: Path, overrides: Sequence[str], options: Mapping[str, tuple[str, str | int | None]]
) -> tuple[JobSpec, Sequence[Point]]:
    """The job with options of the command line, each the ``--set`` of a key; a ``--set`` of that
    key wins.

    Args:
        options: by key: the name of the option, and its value.

    Raises:
        SpecError: naming the option whose value is wrong.
    """
    from pipectl.spec import load_sweep

    given = {key: value for key, (_, value) in options.items() if value is not None}
    sets = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]
    try:
        return load_sweep(job, [*sets, *overrides])
    except SpecError as error:
        set_keys = {text.partition("=")[0] for text in overrides}
        names = {f"--set {key}: ": options[key][0] for key in given.keys() - set_keys}
        problems = []
        for problem in error.problems:
            before = next((text for text in names if str(problem).startswith(text)), None)
            if before is not None:
                problem = Problem(names[before], 0, 0, str(problem).removeprefix(before))
            problems.append(problem)
        raise SpecError(problems, cure=error.cure) from None


def _submit(
    spec: JobSpec, scheduler: str | None, after: Sequence[str], *, wait: bool, as_json: bool
) -> None:
    from pipectl.cli.views.profile import note_origin
    from pipectl.jobs.prepare import prepare
    from pipectl.runs import find_runs

    before = find_runs(Path(spec.output.directory), after)
    with resumable(), progress_bar("profiling") as progress:
        (job,) = prepare(spec, scheduler, progress)
    if job.measurement is not None:
        note_origin(job.measurement, time.time(), "pipectl profile --again measures anew")
    print_launch(job.launch, job.warning)
    if job.profile is not None:
        from pipectl.jobs.planning import coupling_warning

        warn(coupling_warning(spec, job.profile))
    from pipectl.jobs.submit import submit

    submission = submit(job, time.time(), before)
    run, record = submission.run, submission.record
    if not as_json:
        print_plan(job.plan)
        say(f"submitted: {record.name} ({record.scheduler} job {record.job_id})")
        say(f"run directory: {short(run.path)}")
        say(f"see: pipectl status {as_typed(run)}")
    if wait:
        follow_to_the_end(run, as_json=as_json)
    elif as_json:
        say_json(submission_json(run, record))


def _submit_sweep(
    spec: JobSpec,
    points: Sequence[Point],
    scheduler: str | None,
    after: Sequence[str],
    *,
    wait: bool,
    as_json: bool,
) -> None:
    """Submit the runs of a sweep; ``spec`` is without the values of its points."""
    from pipectl.jobs.prepare import prepare
    from pipectl.jobs.sweep import submit_sweep
    from pipectl.runs import find_runs

    before = find_runs(Path(spec.output.directory), after)
    with resumable(), progress_bar("profiling") as progress:
        jobs = prepare(spec, scheduler, progress, points=points)
    for launch, warning in dict.fromkeys((job.launch, job.warning) for job in jobs):
        print_launch(launch, warning)
    at_once = None if spec.sweep is None else spec.sweep.at_once
    sweep = submit_sweep(points, jobs, at_once, time.time(), before)
    if not as_json:
        _print_sweep(sweep)
    if wait:
        _follow_sweep(sweep, as_json=as_json)
    elif as_json:
        say_json(
            [
                submission_json(
                    submission.run,
                    submission.record,
                    sweep=sweep.sweep.name,
                    values=dict(submission.record.sweep.values) if submission.record.sweep else {},
                )
                for submission in sweep.submissions
            ]
        )


def _print_sweep(sweep: SweepSubmission) -> None:
    runs, first = len(sweep.submissions), sweep.submissions[0].record
    unplanned = sum(submission.job.plan is None for submission in sweep.submissions)
    if unplanned:
        note(
            f"no fresh profile for {unplanned} of {runs} runs: their jobs measure the model first, "
            "in their allocation"
        )
    job = "" if first.scheduler == "local" else f" ({first.scheduler} job {sweep.job_id})"
    say(f"submitted: {runs} runs of {first.name}{job}")
    say(f"sweep directory: {short(sweep.sweep.path)}")
    say(f"see: pipectl status {as_typed(sweep.sweep)}")


def _follow_sweep(sweep: SweepSubmission, *, as_json: bool) -> None:
    """Follow one run after the other to its end, and exit with the code of the first failure."""
    from pipectl.cli.follow import exit_code, follow
    from pipectl.cli.views.run import print_sweep
    from pipectl.jobs.state import get_statuses

    codes = []
    for submission in sweep.submissions:
        note(submission.run.name)
        codes.append(exit_code(follow(submission.run)))
    statuses = get_statuses(sweep.sweep.runs(), time.time())
    print_sweep(sweep.sweep, statuses, as_json=as_json)
    if code := next(filter(None, codes), 0):
        raise typer.Exit(code)


def _print_script(spec: JobSpec, points: Sequence[Point], scheduler: str | None) -> None:
    """The script, or that of the array and that of its first run; and what would run."""
    from pipectl.cli.views.plan import headline, prediction_lines
    from pipectl.jobs.places import LOCAL, plan_path, profile_path
    from pipectl.jobs.prepare import prepare
    from pipectl.jobs.submit import render
    from pipectl.jobs.sweep import render_array

    now = time.time()
    (job,) = prepare(spec, scheduler, points=points[:1], make=False)
    script = render(job, now, "-0" if points else "")
    if points:
        at_once = None if spec.sweep is None else spec.sweep.at_once
        sys.stdout.write(render_array(job, len(points), at_once, now))
        note("\nEvery job of the array goes on as the script of its run; that of the first:\n")
    print_launch(job.launch, job.warning)
    if job.plan is not None:
        note(f"plan: {plan_path(job.spec)}: {headline(job.plan)}")
        for line in prediction_lines(job.plan):
            note(line)
    elif job.profile is not None:
        note(f"no fresh plan: submit makes one, of {profile_path(job.spec)}")
    elif job.scheduler == LOCAL:
        note("no fresh profile: submit measures the model first, here")
    else:
        note(NO_PROFILE)
    sys.stdout.write(script)


def _print_forecast(spec: JobSpec, points: Sequence[Point], scheduler: str | None) -> None:
    """When a job, or all of its sweep, would start, in the batch system's words."""
    from pipectl.jobs.prepare import prepare
    from pipectl.jobs.submit import estimate, render
    from pipectl.jobs.sweep import render_array

    (job,) = prepare(spec, scheduler, points=points[:1], make=False)
    if points:
        at_once = None if spec.sweep is None else spec.sweep.at_once
        script = render_array(job, len(points), at_once, time.time())
    else:
        script = render(job, time.time())
    say(
        estimate(script, job.scheduler)
        or "the job is valid; the scheduler forecasts no start (without a queue, it is at once)"
    )
