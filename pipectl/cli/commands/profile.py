"""`pipectl profile`: measure the model's operators, or the links between its ranks."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pipectl.cli.console import note, output, say, say_json, short_path, warn
from pipectl.cli.follow import follow_or_exit
from pipectl.cli.options import JobFile, Json, Overrides, SchedulerOption, flag, option, refuse
from pipectl.cli.progress import profiling_progress
from pipectl.cli.views.profile import links_view, show_measurement
from pipectl.cli.views.submission import describe_job, print_submission, submission_json
from pipectl.cluster import Cluster
from pipectl.errors import UsageError
from pipectl.jobs.job import choose_scheduler, warning_of_code
from pipectl.jobs.job_files import cluster_path, profile_path
from pipectl.jobs.measuring import make_links_job, make_profiling_job
from pipectl.jobs.profiles import Measurement, measure, require_compute_node
from pipectl.jobs.submit import submit as submit_job
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
        option(
            "FILE",
            "File to write; by default runs/NAME.profile.json (.cluster.json).",
            "-o",
            "--output",
        ),
    ] = None,
    effort: Annotated[Effort, flag("How long to measure.")] = Effort.NORMAL,
    again: Annotated[bool, flag("Measure again, without the cache.", "--again")] = False,
    submit: Annotated[bool, flag("Measure in a batch job.", "--submit")] = False,
    wait: Annotated[bool, flag("Follow the job of --submit to its end.", "--wait")] = False,
    links: Annotated[bool, flag("Measure the links between the ranks instead.", "--links")] = False,
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
    where = choose_scheduler(spec, scheduler)
    path = output_file or (cluster_path(spec) if links else profile_path(spec))
    if not (links or submit):
        require_compute_node(where)
        with profiling_progress() as progress:
            measurement = measure(spec, path, progress, effort.value, again=again)
        show_measurement(measurement, path, time.time(), as_json=as_json)
        return
    if links:
        measuring = make_links_job(spec, where, path, effort.value)
    else:
        measuring = make_profiling_job(spec, where, path, effort.value, again=again)
    (submission,) = submit_job([measuring], time.time())
    run, record = submission.run, submission.record
    result = f"the {'cluster' if links else 'profile'} will be in {short_path(path.absolute())}"
    if submit and not as_json:
        lines = () if wait else (result,)
        print_submission(run, f"submitted: {run.name} ({describe_job(record)})", *lines)
    elif links and not submit:
        note(f"measuring: {run.name} ({describe_job(record)})")
    if submit and not wait:
        if as_json:
            say_json(submission_json(run, record, file=str(path.absolute())))
        return
    follow_or_exit(run, as_json=as_json)
    if links:
        _show_links(spec, path, as_json=as_json)
    else:
        measurement = Measurement.load(run.profile, run.measurement)
        show_measurement(measurement, path, time.time(), as_json=as_json)


def _show_links(spec: JobSpec, path: Path, *, as_json: bool) -> None:
    """The measured links, and whether plans find them in ``path``."""
    cluster, usual = Cluster.load(path), cluster_path(spec)
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
