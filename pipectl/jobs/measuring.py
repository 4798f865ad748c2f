"""Jobs that only measure: a model's operators, or the links between a job's ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.errors import UsageError
from pipectl.files import is_stream, make_directory_of
from pipectl.jobs.in_job import PERCENT
from pipectl.jobs.places import measured_key
from pipectl.jobs.request import PREPARE, Job, Work, make_job
from pipectl.runs import PROFILING

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

BUDGET_S = {"fast": 8.0, "normal": 30.0, "thorough": 120.0}
"""Time to measure links, about, by effort."""
_LINKS_WALLTIME_S = 900


def profile_job(spec: JobSpec, scheduler: str, output: Path, effort: str, *, again: bool) -> Job:
    """A job that measures the model, on one node with all the tasks that the job has there.

    Args:
        output: where the profile is put when it is finished.
        effort, again: see :func:`pipectl.jobs.profiles.measure`.

    Raises:
        UsageError: the output cannot be written.
    """
    arguments = ("--effort", effort, *(["--again"] if again else []))
    work = Work(
        suffix="-profile",
        program=("-m", PREPARE),
        arguments=arguments,
        alone=True,
        resources={"nodes": 1},
    )
    return _measuring_job(spec, scheduler, work, output)


def links_job(spec: JobSpec, scheduler: str, output: Path, effort: str) -> Job:
    """A job that starts all ranks as the job itself does, and measures the links between them.

    Args:
        output: where the cluster description is put when it is finished, and a picture beside it.
        effort: a key of ``BUDGET_S``.

    Raises:
        UsageError: the job has one rank, and so no link; or the output cannot be written.
    """
    if spec.resources.ranks < 2:
        raise UsageError(
            "resources: a job of one rank has no links to measure",
            cure="set resources.nodes or resources.tasks_per_node to 2 or more",
        )
    work = Work(
        suffix="-links",
        program=("-m", "mpi4py", "-m", "pipectl.runtime.links.probe", "--run"),
        arguments=("--key", measured_key(spec, scheduler), "--budget", str(BUDGET_S[effort])),
        resources={"walltime": min(spec.resources.walltime, _LINKS_WALLTIME_S)},
    )
    return _measuring_job(spec, scheduler, work, output)


def _measuring_job(spec: JobSpec, scheduler: str, work: Work, output: Path) -> Job:
    make_directory_of(output)
    if is_stream(output):
        raise UsageError(f"{output}: is no file, which a job could write", cure="name another: -o")
    output = output.absolute()
    arguments = ("--output", str(output), *work.arguments)
    work = replace(work, kind=PROFILING, steps=PERCENT, arguments=arguments, output=output.parent)
    return make_job(spec, scheduler, work)
