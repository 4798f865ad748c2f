"""From a job to what a batch system is asked for."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import JobRequest, MpiChoice, Template, check_template, choose_mpi, get
from pipectl.errors import Problem, SpecError
from pipectl.jobs.places import scheduler_name
from pipectl.plan import OffloadTarget
from pipectl.spec.references import parse

if TYPE_CHECKING:
    from pipectl.cluster import Cluster
    from pipectl.jobs.places import Machines
    from pipectl.jobs.profiles import Measurement
    from pipectl.plan import Plan
    from pipectl.profile import Profile
    from pipectl.spec import JobSpec

WORKER = "pipectl.runtime.worker"
PREPARE = "pipectl.jobs.prepare"
TIGHT_HEAP = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}
"""Lets glibc join free memory at once. By default it holds the scraps around aligned blocks back,
so that a block which was freed between two of them is too small for the next of its size, and the
heap grows. It reads this before a process can say anything."""

_MAX_TEMPLATE_BYTES = 2**16


@dataclass(frozen=True)
class Job:
    """A job before it is submitted; see :func:`make_job`.

    Args:
        scheduler: name of the batch system.
        launch: what ranks are started with.
        template: the user's own of job scripts, as it was read.
        cluster: the machines; None for runs that train nothing there.
        profile, plan: None if they are yet to be made, before the job trains.
        warning: why a measured cluster is not used; empty if all is well.
        measurement: how the profile came to be, if it was made now.
    """

    spec: JobSpec
    scheduler: str
    launch: MpiChoice
    template: Template | None = None
    cluster: Cluster | None = None
    profile: Profile | None = None
    plan: Plan | None = None
    warning: str = ""
    measurement: Measurement | None = None


def make_job(
    spec: JobSpec,
    scheduler: str,
    machines: Machines | None = None,
    launch: MpiChoice | None = None,
) -> Job:
    """A job with its launcher and its template of job scripts, yet without profile and plan.

    Args:
        launch: what ranks are started with; by default it is looked for.

    Raises:
        SpecError: the template cannot be read or used, with the line.
    """
    job = Job(spec, scheduler, MpiChoice(spec.launch.mpi), read_template(spec))
    if machines is not None:
        job = replace(job, cluster=machines.cluster, warning=machines.warning)
    return replace(job, launch=launch or choose_mpi(make_request(job)))


def make_request(
    job: Job,
    directory: Path | None = None,
    *,
    prepare: bool = False,
    tag: str | None = None,
    after: tuple[str, ...] = (),
    mpiexec: str | None = None,
) -> JobRequest:
    """What a batch system is asked for so that it trains a job.

    Args:
        directory: of the run; by default one that nobody makes, for checks only.
        prepare: whether the job profiles and plans before it trains.
        tag: text by which the job is found again; by default one that no other submission has.
        after: ids of jobs that must have completed before.
        mpiexec: its path; by default it is looked for.
    """
    spec, plan, python = job.spec, job.plan, sys.executable
    directory = (directory or Path(spec.output.directory) / "check").absolute()
    if plan is None:
        offloads = spec.pipeline.offload == "disk"
    else:
        to_disk = plan.offload_to is OffloadTarget.DISK
        offloads = to_disk and any(stage.offload for stage in plan.stages)
    variables = {**(TIGHT_HEAP if offloads else {}), **spec.environment.variables}
    request = JobRequest(
        name=spec.name,
        tag=tag or f"{directory.name} {uuid.uuid4().hex[:8]}",
        run_directory=directory,
        python=python,
        command=(python, "-m", "mpi4py", "-m", WORKER, "--run", str(directory)),
        resources=spec.resources,
        launch=spec.launch,
        environment=spec.environment,
        slurm=spec.slurm,
        pbs=spec.pbs,
        checkpoint=spec.checkpoint,
        prepare=(python, "-m", PREPARE, str(directory)) if prepare else (),
        binds=_binds(spec, directory.parent),
        mpiexec=mpiexec,
        after=after,
        template=job.template,
    )
    environment = {"variables": variables, "container": spec.container}
    return request.update(launch={"mpi": job.launch.mpi}, environment=environment)


def check_script(spec: JobSpec) -> None:
    """Write the script of a job that has a template of its own, and drop it.

    Raises:
        InvalidInputError: it cannot be written.
    """
    if spec.template_file is not None:
        job = Job(spec, scheduler_name(spec, None), MpiChoice("auto"), read_template(spec))
        plain = {"launcher": "mpiexec", "bind": "none"}
        request = make_request(job, mpiexec="mpiexec").update(launch=plain)
        get(job.scheduler).render(request)


def read_template(spec: JobSpec) -> Template | None:
    """The user's own template of job scripts; None if the job names none.

    Raises:
        SpecError: it cannot be read or used, with the line.
    """
    path = spec.template_file
    if path is None:
        return None
    try:
        content = path.read_bytes()
        if len(content) > _MAX_TEMPLATE_BYTES:
            raise SpecError([Problem(str(path), 0, 0, "larger than 64 KiB; this is no template")])
        template = Template(str(path), content.decode("utf-8"))
    except OSError as error:
        raise SpecError([Problem(str(path), 0, 0, error.strerror or "cannot be read")]) from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise SpecError([Problem(str(path), line, 1, "not UTF-8 text")]) from None
    check_template(template)
    return template


def _binds(spec: JobSpec, runs: Path) -> tuple[Path, ...]:
    """What a container sees: the directories of the runs and of all files that the spec names.

    Preparing in the job writes profiles beside the run directory, for other runs to find.
    """
    if spec.container is None:
        return ()
    code = [parse(text, spec.base) for _, text in spec.factories()]
    files = (*(one.file for one in code), spec.weights_path, spec.cluster_file, spec.schedule_file)
    needed = {path.parent for path in files if path is not None}
    needed |= {one.root for one in code if one.root is not None}
    return (runs, *sorted(needed - {runs}))
