"""Measuring the links between a job's ranks, in a run of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import JobRequest
from pipectl.errors import UsageError
from pipectl.jobs.launching import settle
from pipectl.jobs.machines import measured_key
from pipectl.jobs.measuring_run import prepare_output, submit_measuring
from pipectl.jobs.request import job_request, make_tag
from pipectl.jobs.submit import Submission, new_run
from pipectl.runs import RunDirectory

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

PROBE = "pipectl.runtime.links.probe"
BUDGET_S = {"fast": 8.0, "normal": 30.0, "thorough": 120.0}
"""Time to measure, about, by effort."""
_WALLTIME_S = 900


def submit_links(
    spec: JobSpec, scheduler: str, output: Path, effort: str, now: float
) -> Submission:
    """Start all ranks of a job as it starts them itself, to measure the links between them.

    Args:
        scheduler: its name.
        output: where the cluster description is put when it is finished, and a picture beside it.
        effort: a key of ``BUDGET_S``.
        now: seconds since the epoch.

    Raises:
        UsageError: the job has one rank, and so no link.
        SchedulerError: see :func:`pipectl.jobs.submit.submit`.
    """
    if spec.resources.ranks < 2:
        raise UsageError(
            "resources: a job of one rank has no links to measure",
            cure="set resources.nodes or resources.tasks_per_node to 2 or more",
        )
    prepare_output(output)
    with new_run(spec, f"{spec.name}-links", now) as (run, rollback):
        request = _request(spec, run, scheduler, output.absolute(), BUDGET_S[effort])
        return submit_measuring(spec, run, rollback, request, scheduler, now)


def _request(
    spec: JobSpec, run: RunDirectory, scheduler: str, output: Path, budget_s: float
) -> JobRequest:
    training = job_request(spec, run.path, make_tag(run.path))
    training = settle(training).of(training)
    files = ("--run", str(run.path), "--output", str(output))
    given = ("--key", measured_key(spec, scheduler), "--budget", str(budget_s))
    return replace(
        training,
        name=f"{spec.name}-links",
        walltime_s=min(training.walltime_s, _WALLTIME_S),
        command=(training.python, "-m", "mpi4py", "-m", PROBE, *files, *given),
        stop=None,
        container=training.container and training.container.seeing(output.parent),
    )
