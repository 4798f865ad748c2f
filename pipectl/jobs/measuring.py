"""Runs that only measure: a model's operators, or the links between a job's ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.errors import UsageError
from pipectl.files import is_stream, make_directory_of
from pipectl.jobs.in_job import PERCENT
from pipectl.jobs.places import measured_key
from pipectl.jobs.request import PREPARE, Work, make_job
from pipectl.jobs.submit import Submission, submit
from pipectl.runs import PROFILING

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

BUDGET_S = {"fast": 8.0, "normal": 30.0, "thorough": 120.0}
"""Time to measure links, about, by effort."""
_LINKS_WALLTIME_S = 900


def submit_profile(
    spec: JobSpec, scheduler: str, output: Path, effort: str, now: float, *, again: bool
) -> Submission:
    """Submit the measuring of a job's model, on one node with all the tasks that the job has there.

    Args:
        output: where the profile is put when it is finished.
        effort, again: see :func:`pipectl.jobs.profiles.measure`.
        now: see :func:`pipectl.jobs.submit.submit`, which raises further errors.

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
    return _submit(spec, scheduler, work, output, now)


def submit_links(
    spec: JobSpec, scheduler: str, output: Path, effort: str, now: float
) -> Submission:
    """Start all ranks of a job as it starts them itself, to measure the links between them.

    Args:
        output: where the cluster description is put when it is finished, and a picture beside it.
        effort: a key of ``BUDGET_S``.
        now: see :func:`pipectl.jobs.submit.submit`, which raises further errors.

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
    return _submit(spec, scheduler, work, output, now)


def _submit(spec: JobSpec, scheduler: str, work: Work, output: Path, now: float) -> Submission:
    make_directory_of(output)
    if is_stream(output):
        raise UsageError(f"{output}: is no file, which a job could write", cure="name another: -o")
    output = output.absolute()
    work = replace(
        work,
        kind=PROFILING,
        steps=PERCENT,
        arguments=("--output", str(output), *work.arguments),
        output=output.parent,
    )
    return submit(replace(make_job(spec, scheduler), work=work), now)
