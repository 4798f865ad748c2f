"""A job before it is submitted: where it runs, its work, and its script.

A `JobSpec` is what the user wrote. A :class:`Job` adds what a submission needs: launcher, cluster,
profile and plan. :func:`make_request` turns it into the `JobRequest` of a run directory, from which
a batch system renders the job script.
"""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.access import fault_of_owner
from pipectl.batch import (
    LOCAL,
    Array,
    JobRequest,
    MpiChoice,
    Template,
    check_template,
    choose_mpi,
    find_scheduler,
    get_scheduler,
)
from pipectl.errors import Problem, SchedulerError, SpecError, UsageError
from pipectl.jobs.job_files import find_cluster
from pipectl.plan import OffloadTarget
from pipectl.runs import TRAINING, RunDirectory, SweepDirectory, read_starts, stem_of

if TYPE_CHECKING:
    from pipectl.cluster import Cluster
    from pipectl.jobs.profiles import Measurement
    from pipectl.plan import Plan
    from pipectl.profile import Profile
    from pipectl.rehearsal import Rehearsal
    from pipectl.spec import JobSpec

IN_JOB = "pipectl.jobs.in_job"
"""The module that profiles and plans within a job."""
PERCENT = 100
"""Steps of a run that only measures: it reports its progress in percent."""
TIGHT_HEAP = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}
"""Lets glibc join free memory at once. By default it holds the scraps around aligned blocks back,
so that a block which was freed between two of them is too small for the next of its size, and the
heap grows. It reads this before a process can say anything."""

_MAX_TEMPLATE_BYTES = 2**16
_TITLES = {"slurm": "Slurm", "pbs": "PBS"}


@dataclass(frozen=True)
class Work:
    """What a run does; by default it trains.

    Args:
        kind: see :class:`pipectl.runs.Record`.
        suffix: appended to the name of the job for the name of the run.
        program: arguments of Python before the run directory.
        arguments: arguments of Python after the run directory.
        steps: steps of the run; by default those of the training.
        alone: whether it is one process, without MPI.
        resources: values that replace those of the job.
        output: a further directory that it writes to.
        rehearsal: the sleeps of a rehearsal.
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
        mpi_choice: the kind of MPI that starts the ranks.
        template: the user's template of the job script.
        cluster: the cluster that the plan is for; None for runs that do not train.
        profile, plan: None before they are made.
        prepares: whether the job profiles and plans in its allocation before it trains.
        warning: why a measured cluster is not used; empty if it is, or if there is none.
        measurement: how the profile was measured; None if it was read from a file.
        values: that the sweep gives to this job, by dotted key; None if it is of no sweep.
    """

    spec: JobSpec
    scheduler: str
    mpi_choice: MpiChoice
    template: Template | None = None
    cluster: Cluster | None = None
    profile: Profile | None = None
    plan: Plan | None = None
    prepares: bool = False
    warning: str = ""
    measurement: Measurement | None = None
    work: Work = Work()
    values: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """Name of its run."""
        return f"{self.spec.name}{self.work.suffix}"


def choose_scheduler(spec: JobSpec, name: str | None = None, *, must_answer: bool = False) -> str:
    """``name``, or by default the spec's; ``auto`` is Slurm or PBS if it is installed.

    Args:
        must_answer: whether to check that a batch system which ``auto`` chose answers. Its commands
            may be installed on a machine without a batch system.

    Raises:
        SchedulerError: it does not answer.
    """
    name = name or str(spec.launch.scheduler)
    if name != "auto" or (name := find_scheduler()) == LOCAL or not must_answer:
        return name
    try:
        get_scheduler(name).ping()
    except SchedulerError as error:
        raise SchedulerError(
            f"{_TITLES[name]} is installed here, but does not answer: "
            f"{error.message.splitlines()[-1]}",
            cure="to train on this machine: --scheduler local\n"
            f"to submit all the same: --scheduler {name}",
        ) from error
    return name


def make_job(
    spec: JobSpec, scheduler: str, work: Work | None = None, *, mpi_choice: MpiChoice | None = None
) -> Job:
    """A job with its cluster, launcher and template, but without profile and plan.

    Args:
        work: by default training. Other runs have no cluster.
        mpi_choice: the kind of MPI that starts the ranks; by default :func:`choose_mpi` chooses it.

    Raises:
        SpecError: the template cannot be read or used, with the line.
        MismatchError, DataFileError: see :func:`pipectl.jobs.job_files.find_cluster`.
        SchedulerError: there is no MPI to start the ranks with.
    """
    work = work or Work()
    mpi = mpi_choice or MpiChoice(spec.launch.mpi)
    job = Job(spec, scheduler, mpi, read_template(spec), work=work)
    if work.kind == TRAINING:
        choice = find_cluster(spec, scheduler)
        job = replace(job, cluster=choice.cluster, warning=choice.warning)
    return job if mpi_choice is not None else replace(job, mpi_choice=choose_mpi(make_request(job)))


def make_request(
    job: Job,
    directory: Path | None = None,
    *,
    tag: str | None = None,
    after: tuple[str, ...] = (),
    mpiexec: str | None = None,
) -> JobRequest:
    """The request to a batch system for one run of a job.

    Args:
        directory: the run directory; by default one that does not exist, for checks only.
        tag: text by which the job can be found in the queue; by default a unique one.
        after: ids of jobs that must have completed before this one starts.
        mpiexec: path of mpiexec; by default :func:`pipectl.batch.launchers.find_mpiexec` finds it.
    """
    spec, plan, work, python = job.spec, job.plan, job.work, sys.executable
    directory = (directory or Path(spec.output.directory) / "check").absolute()
    if plan is None:
        offloads = spec.pipeline.offload == "disk"
    else:
        to_disk = plan.offload_to is OffloadTarget.DISK
        offloads = to_disk and any(stage.offload for stage in plan.stages)
    variables = {**(TIGHT_HEAP if offloads else {}), **spec.environment.variables}
    checkpoint = spec.checkpoint
    if requeues := checkpoint.max_requeues:  # as often as for a new run
        starts = read_starts(RunDirectory(directory))
        checkpoint = checkpoint.model_copy(update={"max_requeues": starts + requeues})
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
        checkpoint=checkpoint if work.kind == TRAINING else None,
        alone=work.alone,
        prepare=(python, "-m", IN_JOB, str(directory)) if job.prepares else (),
        binds=() if spec.container is None else _binds(spec, directory.parent, work.output),
        mpiexec=mpiexec,
        after=after,
        template=job.template,
    )
    environment = {"variables": variables, "container": spec.container}
    launch = {"mpi": job.mpi_choice.mpi}
    return request.update(launch=launch, environment=environment, resources=work.resources)


def make_array_request(
    job: Job,
    sweep: SweepDirectory,
    runs: Sequence[Path],
    at_once: int | None,
    *,
    tag: str | None = None,
    after: tuple[str, ...] = (),
) -> JobRequest:
    """The request for a job array that starts the scripts of its runs.

    On this machine, the command of the request starts them.

    Args:
        job: of any run.
        at_once: how many may run at the same time; None sets no limit.
        tag, after: see :func:`make_request`.
    """
    driver = replace(job, work=Work(program=("-m", "pipectl.jobs.sweep")), prepares=False)
    request = make_request(driver, sweep.path, tag=tag, after=after)
    return replace(request, array=Array(tuple(runs), at_once))


def render(job: Job, now: float = 0.0) -> str:
    """The script of a job as it would be submitted; needs neither the batch system nor MPI.

    Args:
        job: of a sweep, its first job.
        now: seconds since the epoch, for the run's name.

    Raises:
        InvalidInputError: a value cannot be written into the script safely.
    """
    suffix = "" if job.values is None else "-0"
    directory = Path(job.spec.output.directory) / f"{stem_of(job.name, now)}{suffix}"
    installed = shutil.which("mpiexec") or (Path(sys.executable).parent / "mpiexec").exists()
    mpiexec = None if installed else "mpiexec"
    request = make_request(job, directory, tag=f"{directory.name} dry-run", mpiexec=mpiexec)
    return get_scheduler(job.scheduler).render(request)


def render_array(job: Job, count: int, at_once: int | None, now: float) -> str:
    """The script of a sweep's job array as it would be submitted.

    Args:
        job: of any of the ``count`` runs.
        at_once, now: see :func:`make_array_request` and :func:`render`.
    """
    stem = Path(job.spec.output.directory).absolute() / stem_of(job.spec.name, now)
    sweep, runs = SweepDirectory.beside(stem), [Path(f"{stem}-{i}") for i in range(count)]
    request = make_array_request(job, sweep, runs, at_once, tag=f"{stem.name} dry-run")
    return get_scheduler(job.scheduler).render(request)


def check_script(spec: JobSpec) -> None:
    """Check that the script of a job with a user's template can be written.

    Raises:
        InvalidInputError: it cannot be written.
    """
    if spec.template_file is not None:
        job = Job(spec, choose_scheduler(spec), MpiChoice("auto"), read_template(spec))
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
    """Directories that a container sees: those of the runs and of all files that the spec names.

    A job that profiles in its allocation writes the profile beside its run directory.
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
    """The first file of a job's code that another user can write, and why; empty if there is none.

    For a module, this also checks the directories from which it imports others, and files of the
    module that do not exist.

    Args:
        groups: whether write permission of a group counts.
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
