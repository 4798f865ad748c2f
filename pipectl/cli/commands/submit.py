"""`pipectl submit`: run the job, or all jobs of its sweep, here or on a batch system."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pipectl.batch import LOCAL, get_scheduler, scheduler_class
from pipectl.batch.edited import Edited, mark_for_editing
from pipectl.cli import options as opt
from pipectl.cli.console import note, say, say_json, short_path, warn
from pipectl.cli.restart import restart_for_job
from pipectl.cli.submission import (
    describe_job,
    follow,
    note_origin,
    print_and_follow,
    print_notes,
    print_plan,
    submission_json,
)
from pipectl.directives import GPUS
from pipectl.errors import SchedulerError, UsageError
from pipectl.files import fault_of_owner
from pipectl.jobs.job import choose_scheduler, fit_to_allocation, render_array, request_at
from pipectl.jobs.output import plan_path, profile_path
from pipectl.jobs.owners import warning_of_code
from pipectl.jobs.prepare import prepare
from pipectl.runs import RunDirectory, SweepDirectory, find_runs, name_in_shell, sweep_of
from pipectl.spec import JobSpec, Point, SpecFile
from pipectl.versions import untested

if TYPE_CHECKING:
    from pipectl.profile import Profile

_OF_BATCH_SYSTEMS = frozenset({"--partition", "--queue", "--account", "--gres"})
"""Options that set keys of some batch systems."""


def command(
    context: typer.Context,
    job: Path = opt.JOB_FILE,
    dry_run: bool = opt.flag("Print the job script; do not submit.", "--dry-run"),
    test_only: bool = opt.flag(
        "Ask the scheduler for the start time; do not submit.", "--test-only"
    ),
    script: Path | None = opt.value(
        "FILE", "Submit this script, printed by --dry-run and then edited."
    ),
    soonest: bool = opt.flag("Submit where `plan --when` says that it is done first.", "--soonest"),
    cheapest: bool = opt.flag(
        "Submit where `plan --when` says that it takes the fewest node-hours.", "--cheapest"
    ),
    compare: list[str] | None = opt.value(
        "N,N,…", "Numbers of nodes for --soonest and --cheapest; by default those of the job."
    ),
    wait: bool = opt.WAIT,
    after: list[str] | None = opt.value(
        "RUN", "Start after RUN has completed.", autocompletion=opt.names_of_runs
    ),
    scheduler: str | None = opt.SCHEDULER,
    partition: str | None = opt.value(
        "NAME", "Slurm partition (slurm.partition).", "-p", "--partition"
    ),
    queue: str | None = opt.value("NAME", "PBS queue (pbs.queue).", "-q", "--queue"),
    account: str | None = opt.value(
        "NAME", "Account to charge (slurm.account or pbs.account).", "-A", "--account"
    ),
    nodes: Any = opt.NODES,
    walltime: str | None = opt.value(
        "TIME",
        "Time limit; a number alone is minutes, but not for PBS (resources.walltime).",
        *("-t", "--time"),
        parser=opt.check_walltime,
    ),
    gres: str | None = opt.value(
        "GRES", "gpu[:TYPE][:N] sets resources.gpus_per_node; others set slurm.options.gres."
    ),
    as_json: bool = opt.JSON,
    overrides: list[str] | None = opt.OVERRIDES,
) -> None:
    if dry_run and test_only:
        raise UsageError("--dry-run and --test-only: choose one")
    counts = _read_choice(context, compare, soonest=soonest, cheapest=cheapest)
    if dry_run or test_only:
        only, hint = "--dry-run and --test-only", "leave it out"
        opt.refuse(context, "--json", f"{only} print text", hint=hint)
        opt.refuse(context, "--wait --after --script", f"{only} submit nothing", hint=hint)
    gres_settings = _gres_settings(gres or "")
    values = {
        "resources.nodes": nodes,
        "resources.walltime": walltime,
        **gres_settings,
        "slurm.partition": partition,
        "slurm.account": account,
        "pbs.queue": queue,
        "pbs.account": account,
    }
    settings = [
        f"{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in values.items()
        if value is not None
    ]
    file = SpecFile.read(job, [*settings, *(overrides or ())])  # --set has precedence
    spec = file.spec(check_names=True)
    restart_for_job(spec, job)
    points = file.points(spec)
    batch_system = choose_scheduler(spec, scheduler, must_answer=not (dry_run or test_only))
    as_asked, spec = spec, fit_to_allocation(spec, batch_system)
    unused = _OF_BATCH_SYSTEMS - scheduler_class(batch_system).submit_options
    if gres_settings.keys() == {"resources.gpus_per_node"}:
        unused -= {"--gres"}
    opt.refuse(context, " ".join(unused), f"is not used with {batch_system}", hint="leave it out")
    warn(warning_of_code(spec, job))
    warn(untested("torch"))
    profile = None
    if soonest or cheapest:
        if spec.sweep is not None:
            why = "are for one run, not for a sweep"
            opt.refuse(context, "--soonest --cheapest", why, hint="leave it out")
        spec, profile = _choose_place(as_asked, batch_system, job, counts, soonest=soonest)
    if dry_run or test_only:
        _show_script(spec, points, batch_system, job, profile, test_only=test_only)
    else:
        if spec.sweep is not None:
            opt.refuse(context, "--script", "is for one run, not for a sweep", hint="leave it out")
        edited = None if script is None else _read_script(script)
        runs = find_runs(Path(spec.output.directory), after or ())
        _submit_and_follow(
            spec, points, batch_system, runs,
            profile=profile, edited=edited, wait=wait, as_json=as_json,
        )  # fmt: skip


def _read_choice(
    context: typer.Context, compare: list[str] | None, *, soonest: bool, cheapest: bool
) -> tuple[int, ...] | None:
    """The numbers of nodes to choose among; None for those of the job.

    Raises:
        UsageError: an option cannot be combined with others.
    """
    if soonest and cheapest:
        raise UsageError("--soonest and --cheapest: choose one")
    if not (soonest or cheapest):
        opt.refuse(context, "--compare", "is for --soonest and --cheapest", hint="leave it out")
        return None
    why = "is what --soonest and --cheapest choose"
    opt.refuse(context, "--partition --queue", why, hint="leave it out")
    if compare:
        opt.refuse(context, "--nodes", "cannot be used with --compare", hint="leave it out")
    return opt.read_node_counts(compare)


def _choose_place(
    spec: JobSpec, batch_system: str, file: Path, counts: tuple[int, ...] | None, *, soonest: bool
) -> tuple[JobSpec, Profile | None]:
    """The job where `plan --when` marks it, and the profile that holds there; see
    :func:`pipectl.jobs.prospects.choose`."""
    from pipectl.cli.search import ask_prospects
    from pipectl.cli.views.prospects import describe
    from pipectl.jobs.planning import gather_job
    from pipectl.jobs.prospects import choose

    inputs = gather_job(spec, batch_system, measure=f"pipectl profile {file}")
    for warning in inputs.warnings:
        warn(warning)
    found = ask_prospects(inputs, counts)
    row = found.soonest if soonest else found.cheapest
    if row is None:
        what = "the start is known nowhere" if found.rows else "the job can run nowhere"
        raise SchedulerError(
            f"{what}: `pipectl plan --when` shows what was answered",
            hint="without --soonest and --cheapest, the job goes where it says itself",
        )
    note(f"{'soonest' if soonest else 'cheapest'}: {describe(row, found.now)}")
    return choose(found, row, inputs)


def _gres_settings(gres: str) -> dict[str, str | int]:
    """Values of the spec for ``--gres``, by dotted key: ``gpu:a100:2,nvme:1``."""
    others = gres.split(",")
    gpus = next(filter(None, map(GPUS.fullmatch, others)), None)
    settings: dict[str, str | int] = {}
    if gpus is not None:
        others.remove(gpus[0])
        kind, count = gpus[1], int(gpus[2] or 1)
        settings["resources.gpus_per_node"] = count
        if kind:
            settings["slurm.options.gpus-per-node"] = f"{kind}:{count}"
    if text := ",".join(others):
        settings["slurm.options.gres"] = text
    return settings


def _read_script(file: Path) -> Edited:
    """Read a script that a person has edited; ``-`` is standard input."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UsageError(f"--script: {file}: cannot be read: {why}") from None
    if str(file) != "-" and (fault := fault_of_owner(file, groups=False)):
        warn(f"{file} {fault}; it runs as you")
    return Edited(str(file), text)


def _show_script(
    spec: JobSpec,
    points: Sequence[Point],
    scheduler: str,
    file: Path,
    profile: Profile | None,
    *,
    test_only: bool,
) -> None:
    """Print the plan and the job script; for a sweep, those of its first run after the script of
    the job array. With ``test_only``, print when the job would start instead."""
    now = time.time()
    (job,) = prepare(spec, scheduler, points=points[:1], profile=profile, make_missing=False)
    request, array_script = request_at(job, now, needs_mpi=False), ""
    system = get_scheduler(job.scheduler)
    script = system.render(request)
    if spec.sweep is not None:
        array_script = render_array(job, len(points), spec.sweep.at_once, now)
    if test_only:
        from pipectl.jobs.submit import limits_warning  # a dry run does not import it

        warn(limits_warning(request, job.scheduler))
        forecast = system.estimate(array_script or script)
        no_queue = "the scheduler gives no start time (without a queue, jobs start at once)"
        say(forecast or f"the job is valid; {no_queue}")
        return
    if array_script:
        sys.stdout.write(array_script)
        note("\nEach task of the array runs the script of its run. The first one is:\n")
    print_notes([job])
    if job.plan is None and job.profile is not None:
        note(f"no up-to-date plan: submit makes one from {profile_path(spec)}")
    else:
        print_plan([job], before=f"plan: {plan_path(spec)}: ", tell=note)
    submission = f"pipectl submit {shlex.quote(str(file))} --script FILE"
    sys.stdout.write(script if array_script else mark_for_editing(script, submission))


def _submit_and_follow(
    spec: JobSpec,
    points: Sequence[Point],
    scheduler: str,
    after: Sequence[RunDirectory],
    *,
    profile: Profile | None,
    edited: Edited | None,
    wait: bool,
    as_json: bool,
) -> None:
    """Submit a job, or one run per point of its sweep.

    Args:
        spec: the job, without the values of its sweep.
        after: runs that must complete before the job starts.
        profile: to plan with; None to find or measure one.
        edited: the script of the job, if a person has edited it.
    """
    # A dry run does not import these.
    from pipectl.cli.progress import profiling_progress
    from pipectl.jobs.submit import submit
    from pipectl.jobs.warnings import warnings_of

    began = time.time()
    with profiling_progress() as progress:
        jobs = prepare(spec, scheduler, progress, points=points, profile=profile)
    if jobs[0].has_new_profile and not points and jobs[0].profile is not None:
        note_origin(jobs[0].profile, began, "use `pipectl profile --again` to measure again")
    print_notes(jobs)
    profiled = [(each.spec, each.profile) for each in jobs if each.profile is not None]
    for text in dict.fromkeys(text for each in profiled for text in warnings_of(*each)):
        warn(text)
    at_once = None if spec.sweep is None else spec.sweep.at_once
    submissions = submit(jobs, time.time(), after, at_once=at_once, edited=edited)
    if edited is not None:
        note("`resume` writes the script anew: permanent changes belong in the job")
    if not as_json:
        print_plan(jobs)
    run, record = submissions[0].run, submissions[0].record
    if record.sweep is None:
        place = f"run directory: {short_path(run.path)}"
        title = f"submitted: {record.name} ({describe_job(record)})"
        print_and_follow(submissions[0], title, place, wait=wait, as_json=as_json)
        return
    warn(submissions[0].warning)
    sweep = sweep_of(run, record.sweep.name)
    if not as_json:
        array = get_scheduler(record.scheduler).array_id(record.job_id or "")
        of = "" if record.scheduler == LOCAL else f" ({record.scheduler} job {array})"
        say(f"submitted: {len(submissions)} runs of {record.name}{of}")
        say(f"sweep directory: {short_path(sweep.path)}")
        say(f"see: pipectl status {name_in_shell(sweep)}")
    if wait:
        _follow_sweep(sweep, as_json=as_json)
    elif as_json:
        say_json(
            [
                submission_json(each, sweep=sweep.name, values=dict(point.values))
                for each, point in zip(submissions, points, strict=True)
            ]
        )


def _follow_sweep(sweep: SweepDirectory, *, as_json: bool) -> None:
    """Follow the runs of a sweep one by one."""
    from pipectl.cli.views.run import print_runs
    from pipectl.jobs.state import get_statuses

    codes = []
    for run in sweep.runs():
        note(run.name)
        codes.append(follow(run).exit_code)
    print_runs(sweep, get_statuses(sweep.runs(), time.time()), as_json=as_json)
    if code := next(filter(None, codes), 0):
        raise typer.Exit(code)
