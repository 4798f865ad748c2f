"""Jobs that measure: the operators of a model on one node, or the links between all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.errors import UsageError
from pipectl.files import is_stream, make_directory_of
from pipectl.jobs.job import IN_JOB, PERCENT, Job, Work, make_job
from pipectl.jobs.job_files import cluster_file_key
from pipectl.runs import PROFILING

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

LINKS_BUDGET_S = {"fast": 8.0, "normal": 30.0, "thorough": 120.0}
"""Time to measure links, about, by effort."""
_LINKS_WALLTIME_S = 900


def make_profiling_job(
    spec: JobSpec, scheduler: str, output: Path, effort: str, *, again: bool
) -> Job:
    """A job that measures the model, on one node with all the tasks that the job has there.

    Args:
        output: where the profile is put when it is finished.
        effort, again: see :func:`pipectl.jobs.profiles.measure`.

    Raises:
        UsageError: the output cannot be written.
    """
    work = Work(
        kind=PROFILING,
        suffix="-profile",
        program=("-m", IN_JOB),
        arguments=("--effort", effort, *(["--again"] if again else [])),
        steps=PERCENT,
        alone=True,
        resources={"nodes": 1},
    )
    return _make_measuring_job(spec, scheduler, work, output)


def make_links_job(spec: JobSpec, scheduler: str, output: Path, effort: str) -> Job:
    """A job that starts all ranks as the job itself does, and measures the links between them.

    Args:
        output: where the cluster description is put when it is finished, and a picture beside it.
        effort: a key of ``LINKS_BUDGET_S``.

    Raises:
        UsageError: the job has one rank, and so no link; or the output cannot be written.
    """
    if spec.resources.ranks < 2:
        raise UsageError(
            "resources: a job of one rank has no links to measure",
            cure="set resources.nodes or resources.tasks_per_node to 2 or more",
        )
    budget = str(LINKS_BUDGET_S[effort])
    work = Work(
        kind=PROFILING,
        suffix="-links",
        program=("-m", "mpi4py", "-m", "pipectl.runtime.links.probe", "--run"),
        arguments=("--key", cluster_file_key(spec, scheduler), "--budget", budget),
        steps=PERCENT,
        resources={"walltime": min(spec.resources.walltime, _LINKS_WALLTIME_S)},
    )
    return _make_measuring_job(spec, scheduler, work, output)


def _make_measuring_job(spec: JobSpec, scheduler: str, work: Work, output: Path) -> Job:
    make_directory_of(output)
    if is_stream(output):
        raise UsageError(f"{output}: is no file, which a job could write", cure="name another: -o")
    output = output.absolute()
    arguments = ("--output", str(output), *work.arguments)
    return make_job(spec, scheduler, replace(work, arguments=arguments, output=output.parent))
