"""`pipectl profile`: measure the model's operators, or the links between its ranks."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipectl.cli.console import note, output, say, say_json, short_path, warn
from pipectl.cli.follow import follow_or_exit, job_of, print_submission, submission_json
from pipectl.cli.options import JobFile, Json, Overrides, SchedulerOption, refuse
from pipectl.cli.progress import profiling_progress
from pipectl.cli.views.profile import links_view, show_measurement
from pipectl.cluster import Cluster
from pipectl.errors import UsageError
from pipectl.jobs.measuring import submit_links, submit_profile
from pipectl.jobs.places import cluster_path, profile_path, scheduler_name
from pipectl.jobs.profiles import Measurement, measure, require_compute_node
from pipectl.jobs.submit import Submission
from pipectl.jobs.trust import warning_of_code
from pipectl.spec import JobSpec, load


class Effort(StrEnum):
    """How long to measure."""

    FAST = "fast"
    NORMAL = "normal"
    THOROUGH = "thorough"


def command(
    job: JobFile,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write; by default runs/NAME.profile.json (.cluster.json).",
        ),
    ] = None,
    effort: Annotated[Effort, typer.Option(help="How long to measure.")] = Effort.NORMAL,
    again: Annotated[
        bool, typer.Option("--again", help="Measure again, without the cache.")
    ] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Measure in a batch job.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the job of --submit to its end.")
    ] = False,
    links: Annotated[
        bool, typer.Option("--links", help="Measure the links between the ranks instead.")
    ] = False,
    scheduler: SchedulerOption = None,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    if wait and not submit:
        raise UsageError("--wait: needs --submit")
    if links:
        cure = "leave --again out: links are always measured again"
        refuse({"--again": again}, "is not used with --links", cure=cure)
    spec = load(job, overrides or ())
    warn(warning_of_code(spec, job))
    where = scheduler_name(spec, None if scheduler is None else scheduler.value)
    if links:
        followed = wait or not submit
        _measure_links(spec, where, output_file, effort.value, wait=followed, as_json=as_json)
        return
    path = output_file or profile_path(spec)
    if not submit:
        require_compute_node(where)
        with profiling_progress() as progress:
            measurement = measure(spec, path, progress, effort.value, again=again)
    else:
        submission = submit_profile(spec, where, path, effort.value, time.time(), again=again)
        if not wait:
            _show_submission(submission, "the profile", path, as_json=as_json)
            return
        if not as_json:
            print_submission(submission.run, _submitted(submission))
        run = submission.run
        follow_or_exit(run, as_json=as_json)
        measurement = Measurement.load(run.profile, run.measurement)
    show_measurement(measurement, path, time.time(), as_json=as_json)


def _measure_links(
    spec: JobSpec, scheduler: str, path: Path | None, effort: str, *, wait: bool, as_json: bool
) -> None:
    """Start the measuring as a run of its own; follow it and show the links.

    Args:
        path: of the cluster description; None is its usual place, where plans look for it.
    """
    usual = cluster_path(spec)
    path = path or usual
    submission = submit_links(spec, scheduler, path, effort, time.time())
    if not wait:
        _show_submission(submission, "the cluster", path, as_json=as_json)
        return
    note(f"measuring: {submission.run.name} ({job_of(submission.record)})")
    follow_or_exit(submission.run, as_json=as_json)
    cluster = Cluster.load(path)
    if as_json:
        say_json(cluster.to_json())
    else:
        output().print(links_view(cluster))
        say(f"cluster: {path}")
        say(f"picture: {path.with_suffix('.svg')}")
    if spec.cluster_file is not None and path.absolute() != spec.cluster_file:
        note(f"the job sets cluster:, so plans use {spec.cluster_file}")
    elif spec.cluster_file is None and path.absolute() != usual.absolute():
        note(f"plans look for it in {usual}; set cluster: to have them use {path}")


def _show_submission(submission: Submission, what: str, path: Path, *, as_json: bool) -> None:
    """The job that measures, and where its result will be."""
    if as_json:
        file = str(path.absolute())
        say_json(submission_json(submission.run, submission.record, file=file))
    else:
        result = f"{what} will be in {short_path(path.absolute())}"
        print_submission(submission.run, _submitted(submission), result)


def _submitted(submission: Submission) -> str:
    return f"submitted: {submission.run.name} ({job_of(submission.record)})"
