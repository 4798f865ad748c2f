"""The job script without a submission: to read, or to ask the batch system about."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipectl.batch import JobRequest, get
from pipectl.files import write_text
from pipectl.jobs.launching import Settled, settle
from pipectl.jobs.machines import find_machines
from pipectl.jobs.places import LOCAL, plan_path, scheduler_name
from pipectl.jobs.plan import fresh_plan
from pipectl.jobs.request import array_request, job_request
from pipectl.jobs.submit import trainable_profile
from pipectl.runs import RunDirectory, SweepDirectory
from pipectl.runs.directory import stem_of

if TYPE_CHECKING:
    from pipectl.plan import Plan
    from pipectl.spec import JobSpec, Point


class Rendered(NamedTuple):
    """A job script, and what a submission would start from.

    Args:
        launch: what ranks are started with.
        profiled: whether there is a fresh profile.
        plan: that lies there and is fresh.
        warning: about the machines; empty where all is well.
    """

    text: str
    launch: Settled
    profiled: bool
    plan: Plan | None
    warning: str


def render(spec: JobSpec, scheduler: str | None, now: float, place: str = "") -> Rendered:
    """The job script as it would be submitted; needs neither the batch system nor MPI.

    Nothing is measured or planned: a plan that is yet to be made is taken for what the job asks.

    Args:
        place: what the run's name ends in where it is of a sweep, ``-0`` say.

    Raises:
        InvalidInputError: a file cannot be used, as in :func:`pipectl.jobs.submit.gather`.
    """
    from pipectl.runtime.supported import check_supported

    name = scheduler_name(spec, scheduler)
    machines, profile, plan = find_machines(spec, name), trainable_profile(spec), None
    if profile is not None:
        plan = fresh_plan(spec, profile, machines.cluster, plan_path(spec))
    if plan is not None:
        check_supported(plan, str(plan_path(spec)))
    prepare = profile is None and name != LOCAL
    request = _dry_request(spec, now, place, prepare=prepare, plan=plan)
    launch = settle(request)
    text = get(name).render(launch.of(request))
    return Rendered(text, launch, profile is not None, plan, machines.warning)


def render_sweep(spec: JobSpec, points: Sequence[Point], scheduler: str | None, now: float) -> str:
    """The script of a sweep's job array as it would be submitted."""
    name = scheduler_name(spec, scheduler)
    request = _dry_request(points[0].spec, now)
    stem = request.run_directory
    runs = [RunDirectory(stem.parent / f"{stem.name}-{index}") for index in range(len(points))]
    request = replace(request, run_directory=SweepDirectory.beside(stem).path)
    at_once = None if spec.sweep is None else spec.sweep.at_once
    return get(name).render(array_request(request, runs, at_once))


def estimate(text: str, name: str) -> str | None:
    """When a job would start, in the batch system's words; None where it has no queue.

    Args:
        text: its script.
        name: of the batch system.

    Raises:
        SchedulerError: the batch system would reject the job.
    """
    with tempfile.TemporaryDirectory(prefix="pipectl-") as directory:
        script = Path(directory) / "job.sh"
        write_text(script, text)
        return get(name).estimate(script)


def _dry_request(
    spec: JobSpec,
    now: float,
    place: str = "",
    *,
    prepare: bool = False,
    plan: Plan | None = None,
) -> JobRequest:
    """The request of a run that will not be made; where MPI is missing, PATH is to have it."""
    directory = Path(spec.output.directory) / f"{stem_of(spec.name, now)}{place}"
    known = shutil.which("mpiexec") or (Path(sys.executable).parent / "mpiexec").exists()
    return job_request(
        spec,
        directory,
        f"{directory.name} dry-run",
        prepare=prepare,
        plan=plan,
        mpiexec=None if known else "mpiexec",
    )
