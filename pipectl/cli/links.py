"""`pipectl profile --links`: measure the links between a job's ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.cli.console import note, output, say, say_json, short
from pipectl.cli.views.submission import print_measuring, submission_json, wait_for

if TYPE_CHECKING:
    from pipectl.jobs.submit import Submission
    from pipectl.spec import JobSpec


def measure_links(
    spec: JobSpec, scheduler: str, path: Path | None, effort: str, *, wait: bool, as_json: bool
) -> None:
    """Start the measuring as a run of its own; follow it and show what it found.

    Args:
        scheduler: its name.
        path: of the cluster description; None is its usual place, where plans look for it.
        effort: see :data:`pipectl.jobs.links.BUDGET_S`.
        wait: whether to follow it.
    """
    from pipectl.jobs.links import submit_links
    from pipectl.jobs.places import cluster_path

    usual = cluster_path(spec)
    path = usual if path is None else path
    submission = submit_links(spec, scheduler, path, effort, time.time())
    if not wait:
        _tell(submission, path, as_json=as_json)
        return
    note(f"measuring: {submission.run.name} ({scheduler} job {submission.record.job_id})")
    wait_for(submission.run, as_json=as_json)
    _show(path, as_json=as_json)
    _hint(spec, path, usual)


def _tell(submission: Submission, path: Path, *, as_json: bool) -> None:
    record, run = submission.record, submission.run
    if as_json:
        say_json(submission_json(run, record, file=str(path.absolute())))
        return
    print_measuring(run, record)
    say(f"when it is done, the cluster is in {short(path.absolute())}")


def _show(path: Path, *, as_json: bool) -> None:
    from pipectl.cli.links_view import links_view
    from pipectl.cluster import Cluster

    cluster = Cluster.load(path)
    if as_json:
        say_json(cluster.to_json())
        return
    console = output()
    console.print(links_view(cluster, console.width))
    say(f"cluster: {path}")
    say(f"picture: {path.with_suffix('.svg')}")


def _hint(spec: JobSpec, path: Path, usual: Path) -> None:
    """Where plans would not find what was measured."""
    if spec.cluster_file is not None and path.absolute() != spec.cluster_file:
        note(f"the job names another cluster, which plans use: {spec.cluster_file}")
    elif spec.cluster_file is None and path.absolute() != usual.absolute():
        note(f"plans look for it in {usual}; set cluster: to have them use {path}")
