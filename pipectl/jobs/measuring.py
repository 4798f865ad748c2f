"""Runs that only measure: a model's operators, or the links between a job's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.errors import UsageError
from pipectl.files import is_stream, make_directory_of
from pipectl.jobs.places import measured_key
from pipectl.jobs.prepare import PERCENT
from pipectl.jobs.profiles import MeasureOptions
from pipectl.jobs.request import PREPARE, make_job, make_request
from pipectl.jobs.submit import Submission, hand_over, new_run
from pipectl.runs import PROFILING

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

BUDGET_S = {"fast": 8.0, "normal": 30.0, "thorough": 120.0}
"""Time to measure links, about, by effort."""
_LINKS_WALLTIME_S = 900


def submit_profile(
    spec: JobSpec, scheduler: str, output: Path, options: MeasureOptions, now: float
) -> Submission:
    """Submit the measuring of a job's model, on one node with all the tasks that the job has there.

    Args:
        scheduler: its name.
        output: where the profile is put when it is finished.
        now: seconds since the epoch.

    Raises:
        UsageError: the output cannot be written.
        SchedulerError: see :func:`pipectl.jobs.submit.submit`.
    """
    arguments = ("--effort", options.effort, *(["--again"] if options.again else []))
    program = ("-m", PREPARE)
    return _submit(spec, scheduler, "profile", program, output, arguments, now, {"nodes": 1})


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
        UsageError: the job has one rank, and so no link; or the output cannot be written.
        SchedulerError: see :func:`pipectl.jobs.submit.submit`.
    """
    if spec.resources.ranks < 2:
        raise UsageError(
            "resources: a job of one rank has no links to measure",
            cure="set resources.nodes or resources.tasks_per_node to 2 or more",
        )
    program = ("-m", "mpi4py", "-m", "pipectl.runtime.links.probe", "--run")
    arguments = ("--key", measured_key(spec, scheduler), "--budget", str(BUDGET_S[effort]))
    limits = {"walltime": min(spec.resources.walltime, _LINKS_WALLTIME_S)}
    return _submit(spec, scheduler, "links", program, output, arguments, now, limits)


def _submit(
    spec: JobSpec,
    scheduler: str,
    what: str,
    program: tuple[str, ...],
    output: Path,
    arguments: tuple[str, ...],
    now: float,
    resources: Mapping[str, int],
) -> Submission:
    """Submit a run that measures.

    Args:
        program: what Python runs, before the run directory and the output.
        resources: other than those of the training.
    """
    make_directory_of(output)
    if is_stream(output):
        raise UsageError(f"{output}: is no file, which a job could write", cure="name another: -o")
    output, name = output.absolute(), f"{spec.name}-{what}"
    job = make_job(spec, scheduler)
    with new_run(spec, name, now) as (run, rollback):
        request = make_request(job, run.path)
        place = (str(run.path), "--output", str(output))
        request = replace(
            request,
            name=name,
            command=(request.python, *program, *place, *arguments),
            checkpoint=None,
            alone=what == "profile",
            binds=tuple(dict.fromkeys((*request.binds, output.parent))),
        ).update(resources=resources)
        submission = Submission.new(run, job, request, now, kind=PROFILING, steps=PERCENT)
        return hand_over([submission], rollback)[0]
