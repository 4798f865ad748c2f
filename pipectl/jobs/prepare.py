"""From a job spec, or the points of a sweep, to jobs that are ready to be submitted.

A `JobSpec` is what the user wrote. :func:`prepare` gathers what a submission needs in a
:class:`Job`: launcher, cluster, profile and plan. :func:`make_request` turns it into the
`JobRequest` of a run directory, from which a batch system renders the job script.
"""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.batch import LOCAL, Array, JobRequest, Template, find_scheduler, get_scheduler
from pipectl.batch.launchers import MpiChoice, choose_mpi
from pipectl.batch.script import check_template
from pipectl.cluster import OffloadTarget
from pipectl.errors import (
    MismatchError,
    PipectlError,
    Problem,
    SchedulerError,
    SpecError,
    UsageError,
)
from pipectl.files import fault_of_owner, read_limited
from pipectl.jobs.job_files import (
    find_cluster,
    fresh_plan,
    fresh_profile,
    join_rows,
    plan_path,
    profile_path,
)
from pipectl.runs import TRAINING, RunDirectory, SweepDirectory, read_starts, stem_of
from pipectl.spec import Point, plan_key, profile_key

if TYPE_CHECKING:
    from pipectl.cluster import Cluster
    from pipectl.jobs.profiles import Measurement
    from pipectl.plan import Plan
    from pipectl.profile import Profile
    from pipectl.profiler.progress import Progress
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
_NOT_CHOSEN = MpiChoice("")
_MAX_TEMPLATE_BYTES = 2**20


@dataclass(frozen=True)
class Job:
    """A job before it is submitted; :func:`complete` finds what it needs. By default it trains.

    Args:
        cluster: that the plan is for; None for runs that do not train.
        profile, plan: None before they are made.
        plans_in_job: whether the job profiles and plans in its allocation before it trains.
        warning: why a measured cluster is not used; empty if it is, or if there is none.
        measurement: None for a profile that was read from a file.
        values: that the sweep gives to this job, by dotted key; None if it is of no sweep.
        kind: see :class:`pipectl.runs.Record`.
        suffix: appended to the name of the job for the name of the run.
        program: arguments of Python before the run directory; ``arguments`` come after it.
        steps: by default those of the training.
        alone: whether it is one process, without MPI.
        resources: values that replace those of the spec.
        output: a further directory that it writes to.
    """

    spec: JobSpec
    scheduler: str
    mpi_choice: MpiChoice = _NOT_CHOSEN
    template: Template | None = None
    cluster: Cluster | None = None
    profile: Profile | None = None
    plan: Plan | None = None
    plans_in_job: bool = False
    warning: str = ""
    measurement: Measurement | None = None
    values: Mapping[str, Any] | None = None
    kind: str = TRAINING
    suffix: str = ""
    program: tuple[str, ...] = ("-m", "mpi4py", "-m", "pipectl.runtime.worker", "--run")
    arguments: tuple[str, ...] = ()
    steps: int | None = None
    alone: bool = False
    resources: Mapping[str, int] = field(default_factory=dict)
    output: Path | None = None
    rehearsal: Rehearsal | None = None

    @property
    def name(self) -> str:
        """Name of its run."""
        return f"{self.spec.name}{self.suffix}"


def prepare(
    spec: JobSpec,
    scheduler: str | None,
    progress: Progress | None = None,
    *,
    points: Sequence[Point] = (),
    make_missing: bool = True,
    must_run: bool = True,
) -> list[Job]:
    """The job, or the jobs of a sweep, with cluster, launcher, profile and plan.

    Profiles and plans that are missing or stale are made, once for all points that share them. On a
    batch system, the job measures its profile itself, since times on a login node say nothing about
    compute nodes. The profile and the plan of ``spec`` itself are saved in the output directory.

    Args:
        spec: the job, without the values of its sweep.
        points: of the sweep; empty for a single job.
        make_missing: whether to make profiles and plans that are missing or stale, and to ask
            whether the batch system answers.
        must_run: whether to refuse imported profiles, and plans that can only be simulated.

    Raises:
        SchedulerError: there is no MPI to start the ranks with, or no batch system answers.
        InvalidInputError: a file, the model or the template cannot be used.
        MismatchError: the profile is imported, or the plan asks for what cannot be run.
        InfeasibleError: no plan fits.
    """
    name = choose_scheduler(spec, scheduler, must_answer=make_missing and must_run)
    choices: dict[str, MpiChoice] = {}
    jobs = []
    for point in points or (None,):
        each, values = (spec, None) if point is None else (point.spec, point.values)
        with _name_values_in_errors(values):
            settings = f"{each.launch} {each.environment}"
            job = Job(each, name, choices.get(settings, _NOT_CHOSEN), values=values)
            jobs.append(complete(job))
            choices[settings] = jobs[-1].mpi_choice

    # All profiles come first: what a process holds while it measures counts as memory of a rank,
    # and the planner is large.
    profiles: dict[str, tuple[Profile | None, Measurement | None]] = {}
    own_key = profile_key(spec) if points else ""
    for index, job in enumerate(jobs):
        with _name_values_in_errors(job.values):
            key = profile_key(job.spec) if points else ""
            if key not in profiles:
                is_own = key == own_key
                profiles[key] = _find_profile(
                    job, progress, save=is_own, make=make_missing, must_run=must_run
                )
        profile, measurement = profiles[key]
        in_job, cluster = profile is None and name != LOCAL, job.cluster
        if profile is not None and cluster is not None:
            profile, cluster = join_rows(profile, cluster)
        jobs[index] = replace(
            job, profile=profile, measurement=measurement, cluster=cluster, plans_in_job=in_job
        )
    plans: dict[str, Plan | None] = {}
    own_key = plan_key(spec) if points else ""
    for index, job in enumerate(jobs):
        with _name_values_in_errors(job.values):
            key = plan_key(job.spec) if points else ""
            if key not in plans:
                plans[key] = _find_plan(
                    job, progress, save=key == own_key, make=make_missing, must_run=must_run
                )
        jobs[index] = replace(job, plan=plans[key])
    return jobs


def _find_profile(
    job: Job, progress: Progress | None, *, save: bool, make: bool, must_run: bool
) -> tuple[Profile | None, Measurement | None]:
    """The saved profile if that is fresh, else one that is measured now and how it was measured."""
    path = profile_path(job.spec)
    profile = fresh_profile(job.spec, path)
    if profile is None and make and job.scheduler == LOCAL:
        from pipectl.jobs.profiles import measure

        if must_run:
            render(job)  # an error in the script is raised before the model is measured
        measurement = measure(job.spec, path if save else None, progress)
        return measurement.profile, measurement
    if profile is not None and profile.fingerprint is None and must_run:
        raise MismatchError(
            f"{path}: an imported profile can be planned, not submitted",
            cure="remove it; the model is then measured",
        )
    return profile, None


def _find_plan(
    job: Job, progress: Progress | None, *, save: bool, make: bool, must_run: bool
) -> Plan | None:
    """The saved plan of a job if it is fresh, else a plan made now."""
    profile, cluster, path = job.profile, job.cluster, plan_path(job.spec)
    if profile is None or cluster is None:
        return None
    plan = fresh_plan(job.spec, profile, cluster, path)
    if plan is None and make:
        if progress is not None:
            progress(0, 0, "planning")
        from pipectl.jobs.planning import find_plan

        plan = find_plan(job.spec, profile, cluster, keep=save)
        if save:
            plan.save(path)
    if plan is not None and must_run:
        from pipectl.runtime.nodes import check_supported

        check_supported(plan, str(path) if save else "the plan")
    return plan


@contextmanager
def _name_values_in_errors(values: Mapping[str, Any] | None) -> Iterator[None]:
    """Begin errors with the values of a point: ``optimizer.kwargs.lr=0.001, training.seed=2``."""
    try:
        yield
    except PipectlError as error:
        if values is not None:
            words = ", ".join(f"{key}={value}" for key, value in values.items())
            error.message = f"{words}: {error.message}"
        raise


def choose_scheduler(spec: JobSpec, name: str | None = None, *, must_answer: bool = False) -> str:
    """``name``, or by default the spec's; ``auto`` is Slurm or PBS if it is installed.

    Args:
        must_answer: whether to raise a SchedulerError if one that ``auto`` chose does not answer:
            its commands may be installed on a machine without a batch system.
    """
    name = name or str(spec.launch.scheduler)
    if name != "auto" or (name := find_scheduler()) == LOCAL or not must_answer:
        return name
    try:
        (system := get_scheduler(name)).ping()
    except SchedulerError as error:
        raise SchedulerError(
            f"{system.title} is installed here, but does not answer: "
            f"{error.message.splitlines()[-1]}",
            cure="to train on this machine: --scheduler local\n"
            f"to submit anyway: --scheduler {name}",
        ) from error
    return name


def complete(job: Job) -> Job:
    """A job with its template, and with the cluster and the kind of MPI if it has none yet.

    Raises:
        PipectlError: see :func:`read_template`, :func:`find_cluster` and :func:`choose_mpi`.
    """
    job = replace(job, template=read_template(job.spec))
    if job.kind == TRAINING:
        choice = find_cluster(job.spec, job.scheduler)
        job = replace(job, cluster=choice.cluster, warning=choice.warning)
    return job if job.mpi_choice.mpi else replace(job, mpi_choice=choose_mpi(make_request(job)))


def make_request(
    job: Job,
    directory: Path | None = None,
    *,
    tag: str | None = None,
    after: tuple[str, ...] = (),
    mpiexec: str | None = None,
    array: Array | None = None,
) -> JobRequest:
    """The request to a batch system for one run of a job, or for a job array of several.

    The arguments are those of :class:`JobRequest`; the directory is by default one that does not
    exist, for checks only.
    """
    if array is not None:
        program, at_once = ("-m", "pipectl.jobs.sweep"), (str(array.at_once or 1),)
        job = replace(job, program=program, arguments=at_once, plans_in_job=False)
    spec, plan, python = job.spec, job.plan, sys.executable
    directory = (directory or Path(spec.output.directory) / "check").absolute()
    if plan is None:
        offloads = spec.pipeline.offload == "disk"
    else:
        to_disk = plan.offload_to is OffloadTarget.DISK
        offloads = to_disk and any(stage.offload for stage in plan.stages)
    variables = {**(TIGHT_HEAP if offloads else {}), **spec.environment.variables}
    checkpoint = spec.checkpoint
    if requeues := checkpoint.max_requeues:
        # The script counts all starts of the run; each submission allows as many more.
        starts = read_starts(RunDirectory(directory))
        checkpoint = checkpoint.model_copy(update={"max_requeues": starts + requeues})
    request = JobRequest(
        name=job.name,
        tag=tag or f"{directory.name} {uuid.uuid4().hex[:8]}",
        run_directory=directory,
        python=python,
        command=(python, *job.program, str(directory), *job.arguments),
        resources=spec.resources,
        launch=spec.launch,
        environment=spec.environment,
        slurm=spec.slurm,
        pbs=spec.pbs,
        checkpoint=checkpoint if job.kind == TRAINING else None,
        alone=job.alone,
        first_command=(python, "-m", IN_JOB, str(directory)) if job.plans_in_job else (),
        binds=() if spec.container is None else _binds(spec, directory.parent, job.output),
        mpiexec=mpiexec,
        after=after,
        template=job.template,
        array=array,
    )
    environment = {"variables": variables, "container": spec.container}
    launch = {"mpi": job.mpi_choice.mpi or spec.launch.mpi}
    return request.update(launch=launch, environment=environment, resources=job.resources)


def render(job: Job, now: float = 0.0, count: int = 0, at_once: int | None = None) -> str:
    """The script of a job as it would be submitted; needs neither the batch system nor MPI.

    Args:
        job: of a sweep, its first job.
        now: seconds since the epoch, for the run's name.
        count: of the runs of a sweep, for the script of their job array.
        at_once: how many of them may run at the same time; None sets no limit.
    """
    stem, array = Path(job.spec.output.directory).absolute() / stem_of(job.name, now), None
    directory = stem if job.values is None else Path(f"{stem}-0")
    if count:
        directory = SweepDirectory.beside(stem).path
        array = Array(tuple(Path(f"{stem}-{index}") for index in range(count)), at_once)
    installed = shutil.which("mpiexec") or (Path(sys.executable).parent / "mpiexec").exists()
    mpiexec = None if installed else "mpiexec"
    tag = f"{directory.name} dry-run"
    request = make_request(job, directory, tag=tag, mpiexec=mpiexec, array=array)
    return get_scheduler(job.scheduler).render(request)


def check_script(spec: JobSpec) -> None:
    """Raise an InvalidInputError if a job has a template with which no script can be written."""
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
        content = read_limited(path, _MAX_TEMPLATE_BYTES)
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
    module that do not exist. With ``groups``, write permission of a group counts.
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
