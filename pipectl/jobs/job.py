"""A job before it is submitted: what it runs, and what a batch system is asked for."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.access import fault_of_owner
from pipectl.batch import JobRequest, MpiChoice, Template, check_template, choose_mpi, get_scheduler
from pipectl.errors import Problem, SpecError, UsageError
from pipectl.jobs.places import find_cluster, scheduler_name
from pipectl.plan import OffloadTarget
from pipectl.runs import TRAINING, stem_of

if TYPE_CHECKING:
    from pipectl.cluster import Cluster
    from pipectl.jobs.profiles import Measurement
    from pipectl.plan import Plan
    from pipectl.profile import Profile
    from pipectl.rehearsal import Rehearsal
    from pipectl.spec import JobSpec

PREPARE = "pipectl.jobs.in_job"
PERCENT = 100
"""Steps of a run that only measures: it reports its progress in percent."""
TIGHT_HEAP = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}
"""Lets glibc join free memory at once. By default it holds the scraps around aligned blocks back,
so that a block which was freed between two of them is too small for the next of its size, and the
heap grows. It reads this before a process can say anything."""

_MAX_TEMPLATE_BYTES = 2**16


@dataclass(frozen=True)
class Work:
    """What a run does; by default it trains.

    Args:
        kind: see :class:`pipectl.runs.Record`.
        suffix: of the run's name, after that of the job.
        program: what Python runs, before the run directory.
        arguments: after the run directory.
        steps: None for those of the training.
        alone: whether one process does it, without MPI.
        resources: that differ from those of the job.
        output: directory that it writes to beside the run directory.
        rehearsal: what the ranks wait for if they rehearse.
    """

    kind: str = TRAINING
    suffix: str = ""
    program: tuple[str, ...] = ("-m", "mpi4py", "-m", "pipectl.runtime.worker", "--run")
    arguments: tuple[str, ...] = ()
    steps: int | None = None
    alone: bool = False
    resources: Mapping[str, int] = field(default_factory=dict)
    output: Path | None = None
    rehearsal: Rehearsal | None = None


@dataclass(frozen=True)
class Job:
    """A job before it is submitted; see :func:`make_job`.

    Args:
        launch: what ranks are started with.
        template: the user's own of job scripts, as it was read.
        cluster: that it is planned for; None for runs that train nothing.
        profile, plan: None if they are yet to be made.
        prepares: whether it makes them itself, before it trains.
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
    prepares: bool = False
    warning: str = ""
    measurement: Measurement | None = None
    work: Work = Work()

    @property
    def name(self) -> str:
        """Name of its run."""
        return f"{self.spec.name}{self.work.suffix}"


def make_job(
    spec: JobSpec, scheduler: str, work: Work | None = None, *, launch: MpiChoice | None = None
) -> Job:
    """A job with its cluster, its launcher and its template, yet without profile and plan.

    Args:
        work: by default it trains. Runs that do something else have no cluster.
        launch: what ranks are started with; by default it is looked for.

    Raises:
        SpecError: the template cannot be read or used, with the line.
        MismatchError, DataFileError: see :func:`pipectl.jobs.places.find_cluster`.
        SchedulerError: there is no MPI to start the ranks with.
    """
    work = work or Work()
    job = Job(spec, scheduler, launch or MpiChoice(spec.launch.mpi), read_template(spec), work=work)
    if work.kind == TRAINING:
        choice = find_cluster(spec, scheduler)
        job = replace(job, cluster=choice.cluster, warning=choice.warning)
    return job if launch is not None else replace(job, launch=choose_mpi(make_request(job)))


def make_request(
    job: Job,
    directory: Path | None = None,
    *,
    tag: str | None = None,
    after: tuple[str, ...] = (),
    mpiexec: str | None = None,
) -> JobRequest:
    """What a batch system is asked for.

    Args:
        directory: of the run; by default one that nobody makes, for checks only.
        tag: text by which the job is found again; by default one that no other submission has.
        after: ids of jobs that must have completed before.
        mpiexec: its path; by default it is looked for.
    """
    spec, plan, work, python = job.spec, job.plan, job.work, sys.executable
    directory = (directory or Path(spec.output.directory) / "check").absolute()
    if plan is None:
        offloads = spec.pipeline.offload == "disk"
    else:
        to_disk = plan.offload_to is OffloadTarget.DISK
        offloads = to_disk and any(stage.offload for stage in plan.stages)
    variables = {**(TIGHT_HEAP if offloads else {}), **spec.environment.variables}
    request = JobRequest(
        name=job.name,
        tag=tag or f"{directory.name} {uuid.uuid4().hex[:8]}",
        run_directory=directory,
        python=python,
        command=(python, *work.program, str(directory), *work.arguments),
        resources=spec.resources,
        launch=spec.launch,
        environment=spec.environment,
        slurm=spec.slurm,
        pbs=spec.pbs,
        checkpoint=spec.checkpoint if work.kind == TRAINING else None,
        alone=work.alone,
        prepare=(python, "-m", PREPARE, str(directory)) if job.prepares else (),
        binds=() if spec.container is None else _binds(spec, directory.parent, work.output),
        mpiexec=mpiexec,
        after=after,
        template=job.template,
    )
    environment = {"variables": variables, "container": spec.container}
    launch = {"mpi": job.launch.mpi}
    return request.update(launch=launch, environment=environment, resources=work.resources)


def render(job: Job, now: float = 0.0, suffix: str = "") -> str:
    """The script of a job as it would be submitted; needs neither the batch system nor MPI.

    Args:
        now: seconds since the epoch, for the run's name.
        suffix: of that name, ``-0`` if it is the first of a sweep.

    Raises:
        InvalidInputError: a value cannot be written into the script safely.
    """
    directory = Path(job.spec.output.directory) / f"{stem_of(job.name, now)}{suffix}"
    installed = shutil.which("mpiexec") or (Path(sys.executable).parent / "mpiexec").exists()
    mpiexec = None if installed else "mpiexec"
    request = make_request(job, directory, tag=f"{directory.name} dry-run", mpiexec=mpiexec)
    return get_scheduler(job.scheduler).render(request)


def check_script(spec: JobSpec) -> None:
    """Write the script of a job that has a template of its own, and drop it.

    Raises:
        InvalidInputError: it cannot be written.
    """
    if spec.template_file is not None:
        job = Job(spec, scheduler_name(spec, None), MpiChoice("auto"), read_template(spec))
        plain = {"launcher": "mpiexec", "bind": "none"}
        request = make_request(job, mpiexec="mpiexec").update(launch=plain)
        get_scheduler(job.scheduler).render(request)


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


def _binds(spec: JobSpec, runs: Path, output: Path | None) -> tuple[Path, ...]:
    """What a container sees: the directories of the runs and of all files that the spec names.

    Preparing in the job writes profiles beside the run directory, for other runs to find.
    """
    code = [reference for _, reference in spec.factories()]
    files = (*(one.file for one in code), spec.weights_path, spec.cluster_file, spec.schedule_file)
    needed = {path.parent for path in files if path is not None}
    needed |= {one.root for one in code if one.root is not None}
    further = () if output is None else (output,)
    return tuple(dict.fromkeys((runs, *sorted(needed), *further)))


def refuse_code_of_others(spec: JobSpec, job: Path) -> None:
    """Raise a UsageError if somebody else could have written the code of a job, or its file."""
    if fault := _code_of_others(spec, job):
        raise UsageError(
            f"{fault}, and its code would run as you",
            cure="read what it does; then add --trust-owner",
        )


def warning_of_code(spec: JobSpec, job: Path) -> str:
    """A warning if somebody else owns the code of a job that is named for the first time."""
    fault = _code_of_others(spec, job, groups=False)
    return f"{fault}; its code runs as you" if fault else ""


def _code_of_others(spec: JobSpec, job: Path, *, groups: bool = True) -> str:
    """Which file of a job's code somebody else could have written; empty if nobody could.

    Modules count with the directories from which they import others; files of a module that do not
    exist are looked at, too.

    Args:
        groups: whether members of a group that may write it count.
    """
    files = [job]
    for _, reference in spec.factories():
        if reference.file is not None:
            files += [reference.file, reference.file.parent]
        elif reference.root is not None:
            inner = Path(reference.root, *str(reference.module).split("."))
            files.append(inner.with_name(f"{inner.name}.py"))
            while inner != reference.root:
                files += [inner / "__init__.py", inner]
                inner = inner.parent
            files.append(reference.root)
    if spec.template_file is not None:
        files += [spec.template_file, spec.template_file.parent]
    for path in dict.fromkeys(files):
        if fault := fault_of_owner(path, groups=groups):
            return f"{path} {fault}"
    return ""
