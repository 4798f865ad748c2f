"""From a job spec, or the points of a sweep, to jobs that are ready to be submitted.

    JobSpec -> Job (with cluster, profile, plan) -> Submission -> RunDirectory -> RunStatus

:func:`find_cluster`, :func:`read_profile` and :func:`read_plan` read a file if it is up to date;
:func:`measure_profile` and :func:`make_plan` make a new one. They are used in the output directory
and in run directories alike. :func:`make_request` turns a job into the `JobRequest` from which a
batch system renders the script of a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipectl.batch import LOCAL, Array, JobRequest, Template, find_scheduler, get_scheduler
from pipectl.batch.launchers import MpiChoice, choose_mpi
from pipectl.batch.script import check_template
from pipectl.cluster import Cluster, OffloadTarget, assumed_cluster
from pipectl.errors import (
    MismatchError,
    PipectlError,
    Problem,
    SchedulerError,
    SpecError,
    UsageError,
)
from pipectl.files import fault_of_owner, read_limited
from pipectl.runs import TRAINING, RunDirectory, SweepDirectory, read_starts, stem_of
from pipectl.spec import JobSpec, Point, links_key, plan_key, profile_key

if TYPE_CHECKING:
    from pipectl.plan import Plan
    from pipectl.profile import Profile
    from pipectl.profiler.progress import Progress
    from pipectl.rehearsal import Rehearsal

T = TypeVar("T", bound=Hashable)
IN_JOB = "pipectl.jobs.in_job"
"""The module that profiles and plans in a job's allocation."""
PERCENT = 100
"""Steps of a run that only measures: it reports its progress in percent."""
TIGHT_HEAP = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}
"""Makes glibc join free memory at once. By default it keeps small pieces around aligned blocks
apart, so a freed block is too small for the next one of its size, and the heap grows. glibc reads
this before a process can set anything."""
UNKNOWN_ROWS = (
    "what messages take of the ranks' own time, and the start and end of a step, is not measured, "
    "and taken as nothing"
)
_NOT_CHOSEN = MpiChoice("")
_MAX_TEMPLATE_BYTES = 2**20


@dataclass(frozen=True)
class Job:
    """A job before it is submitted. By default it trains.

    Args:
        cluster: machines to plan for; None if the job does not train.
        cluster_file: file of the cluster; None if the cluster is assumed.
        file: file of the job, if it is known.
        warning: why a measured cluster is not used; empty if there is nothing to say.
        profile, plan: None before they are made.
        is_profiled_now: whether the profile was measured, or found in the cache, by this process.
        plans_in_job: whether the job profiles and plans in its allocation before it trains.
        values: values of the job's point of the sweep, by dotted key; None without a sweep.
        kind: see :class:`pipectl.runs.Record`.
        suffix: appended to the name of the job to name the run.
        program: arguments of Python before the run directory; ``arguments`` come after it.
        steps: number of steps; None for those of the training.
        alone: whether the job is one process, without MPI.
        resources: values that replace those of the spec.
        output: directory that the job writes to besides its run directory.
    """

    spec: JobSpec
    scheduler: str
    mpi_choice: MpiChoice = _NOT_CHOSEN
    template: Template | None = None
    cluster: Cluster | None = None
    cluster_file: Path | None = None
    file: Path | None = None
    warning: str = ""
    profile: Profile | None = None
    is_profiled_now: bool = False
    plan: Plan | None = None
    plans_in_job: bool = False
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
        """Name of the run."""
        return f"{self.spec.name}{self.suffix}"

    def with_profile(self, profile: Profile | None) -> Job:
        """The job with a profile, whose times of rows complete the cluster.

        The profile then no longer says that these times are assumed.
        """
        if profile is None or self.cluster is None:
            return replace(self, profile=profile)
        cluster = self.cluster.with_rows(profile.rows)
        if all(node.device.rows is not None for node in cluster.nodes):
            others = [each for each in profile.assumptions if not each.startswith(UNKNOWN_ROWS)]
            profile = replace(profile, assumptions=tuple(others))
        return replace(self, profile=profile, cluster=cluster)

    @property
    def plan_file_key(self) -> str:
        """Hash of spec, profile and cluster; the file of the job's plan has the same key."""
        assert self.profile is not None
        assert self.cluster is not None
        parts = [plan_key(self.spec), self.profile.to_json(), self.cluster.to_json()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def profile_path(spec: JobSpec) -> Path:
    """``runs/<name>.profile.json``."""
    return Path(spec.output.directory) / f"{spec.name}.profile.json"


def plan_path(spec: JobSpec) -> Path:
    """``runs/<name>.plan.json``."""
    return Path(spec.output.directory) / f"{spec.name}.plan.json"


def cluster_path(spec: JobSpec) -> Path:
    """``runs/<name>.cluster.json``, which `pipectl profile --links` writes."""
    return Path(spec.output.directory) / f"{spec.name}.cluster.json"


def prepare(
    spec: JobSpec,
    scheduler: str | None,
    progress: Progress | None = None,
    *,
    file: Path | None = None,
    points: Sequence[Point] = (),
    make_missing: bool = True,
    must_run: bool = True,
) -> list[Job]:
    """Find the cluster, launcher, profile and plan of a job, or of all jobs of a sweep.

    Missing and out-of-date profiles and plans are made, once for all points that share them. On a
    batch system, the job measures its profile itself, because times on a login node say nothing
    about compute nodes. The profile and plan of ``spec`` are saved in the output directory.

    Args:
        spec: the job, without the values of its sweep.
        file: of the job, for messages.
        points: points of the sweep; empty for a single job.
        make_missing: whether to make missing and out-of-date profiles and plans, and to check that
            the batch system answers.
        must_run: whether to refuse imported profiles, and plans that can only be simulated.

    Raises:
        SchedulerError: there is no MPI to start the ranks with, or no batch system answers.
        InvalidInputError: a file, the model or the template cannot be used.
        MismatchError: the profile is imported, or the plan asks for what cannot be run.
        InfeasibleError: no plan fits.
    """
    name = choose_scheduler(spec, scheduler, must_answer=make_missing and must_run)
    jobs = [Job(point.spec, name, file=file, values=point.values) for point in points]
    jobs = jobs or [Job(spec, name, file=file)]
    choices: dict[str, MpiChoice] = {}
    for index, job in enumerate(jobs):
        settings = f"{job.spec.launch} {job.spec.environment}"
        with _name_values_in_errors(job.values):
            jobs[index] = complete(replace(job, mpi_choice=choices.get(settings, _NOT_CHOSEN)))
        choices[settings] = jobs[index].mpi_choice

    # All profiles come first: the memory of a measuring process counts as memory of a rank, and
    # the planner is large.
    _add_profiles(jobs, spec, progress, make_missing=make_missing, must_run=must_run)
    _add_plans(jobs, spec, progress, make_missing=make_missing, must_run=must_run)
    return jobs


def _add_profiles(
    jobs: list[Job], spec: JobSpec, progress: Progress | None, *, make_missing: bool, must_run: bool
) -> None:
    """Give every job its profile; that of ``spec`` is saved if it is new."""
    own_key = profile_key(spec)
    for key, members in _group(jobs, lambda job: profile_key(job.spec)).items():
        first = jobs[members[0]]
        is_local = first.scheduler == LOCAL
        makes_profiles = make_missing and is_local
        with _name_values_in_errors(first.values):
            if makes_profiles and must_run:
                render(first)  # an error in the script is raised before the model is measured
            path = profile_path(first.spec)
            # the cluster of other jobs with this profile may be another
            first = read_profile(replace(first, cluster=None), path)
            if first.profile is None and makes_profiles:
                first = measure_profile(first, path if key == own_key else None, progress)
            if must_run and first.profile is not None and first.profile.fingerprint is None:
                raise MismatchError(
                    f"{path}: an imported profile can be planned, not submitted",
                    cure="remove it; the model is then measured",
                )
        for index in members:
            jobs[index] = replace(
                jobs[index].with_profile(first.profile),
                is_profiled_now=first.is_profiled_now,
                plans_in_job=first.profile is None and not is_local,
            )


def _add_plans(
    jobs: list[Job], spec: JobSpec, progress: Progress | None, *, make_missing: bool, must_run: bool
) -> None:
    """Give every job with a profile its plan; that of ``spec`` is saved if it is new."""
    own_key, own_links = plan_key(spec), cluster_file_key(spec, jobs[0].scheduler)
    own_plan: Plan | None = None
    # The links may be measured for some points with the same key, and not for others.
    for (key, _), members in _group(jobs, lambda job: (plan_key(job.spec), job.cluster)).items():
        first = jobs[members[0]]
        if first.profile is None:
            continue
        links = cluster_file_key(first.spec, first.scheduler)
        is_own, path = (key, links) == (own_key, own_links), plan_path(first.spec)
        with _name_values_in_errors(first.values):
            first = read_plan(first, path)
            if first.plan is None and make_missing:
                first = make_plan(first, progress)
                own_plan = first.plan if is_own else own_plan
            if must_run and first.plan is not None:
                from pipectl.runtime.nodes import check_supported

                check_supported(first.plan, str(path) if is_own else "the plan")
        for index in members:
            jobs[index] = replace(jobs[index], plan=first.plan)
    if own_plan is not None:  # at the end, as all plans keep the micro-batches of the last one
        own_plan.save(plan_path(spec))


def _group(jobs: Sequence[Job], key_of: Callable[[Job], T]) -> dict[T, list[int]]:
    """Indices of the jobs with the same key."""
    groups: dict[T, list[int]] = {}
    for index, job in enumerate(jobs):
        with _name_values_in_errors(job.values):
            groups.setdefault(key_of(job), []).append(index)
    return groups


@contextmanager
def _name_values_in_errors(values: Mapping[str, Any] | None) -> Iterator[None]:
    """Put the values of a point before errors: ``optimizer.kwargs.lr=0.001, training.seed=2``."""
    try:
        yield
    except PipectlError as error:
        if values is not None:
            words = ", ".join(f"{key}={value}" for key, value in values.items())
            error.message = f"{words}: {error.message}"
        raise


def choose_scheduler(spec: JobSpec, name: str | None = None, *, must_answer: bool = False) -> str:
    """Choose ``name``, or the spec's scheduler; ``auto`` is Slurm or PBS if one is installed.

    Args:
        must_answer: whether to raise a SchedulerError if the scheduler that ``auto`` chose does not
            answer: its commands may be installed on a machine without a batch system.
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
    """Add the template, the cluster if the job trains, and the kind of MPI if there is none yet.

    Raises:
        PipectlError: see :func:`read_template`, :func:`find_cluster` and :func:`choose_mpi`.
    """
    job = replace(job, template=read_template(job.spec))
    job = find_cluster(job) if job.kind == TRAINING else job
    return job if job.mpi_choice.mpi else replace(job, mpi_choice=choose_mpi(make_request(job)))


def find_cluster(job: Job) -> Job:
    """Add the described cluster, else the measured one if it is up to date, else an assumed one.

    Raises:
        MismatchError: the described cluster has another number of ranks than the resources.
        DataFileError: a cluster description cannot be read.
    """
    spec, resources = job.spec, job.spec.resources
    if (path := spec.cluster_file) is not None:
        cluster = Cluster.load(path)
        if cluster.ranks != resources.ranks:
            raise MismatchError(
                f"{path}: describes {cluster.ranks} ranks, resources: ask for {resources.ranks}",
                cure="make nodes x tasks_per_node equal to the ranks of the cluster file",
            )
        return replace(job, cluster=cluster, cluster_file=path)
    if job.scheduler == LOCAL:  # all ranks here, whatever nodes are asked for
        usable = len(os.sched_getaffinity(0))
        cores = max(1, usable // resources.cpus_per_task)
        memory = resources.memory_per_task or memory_of_this_machine() // resources.ranks
        cluster = assumed_cluster("this machine", [resources.ranks], cores, memory)
        assumed = replace(cluster, source=f"assumed: shared memory, {usable} usable cores")
    else:
        tasks = resources.tasks_per_node
        layout = [tasks] * resources.nodes
        assumed = assumed_cluster("from resources:", layout, tasks, resources.memory_per_task)
    path = cluster_path(spec)
    if not path.exists():
        return replace(job, cluster=assumed)
    measured_cluster = Cluster.load(path)
    layout, expected = ([node.ranks for node in each.nodes] for each in (measured_cluster, assumed))
    if measured_cluster.key not in (None, cluster_file_key(spec, job.scheduler)):
        fault = "was measured for other resources, launch settings or machines"
    elif measured_cluster.key is None and layout != expected:
        fault = f"describes nodes of {layout} ranks, but resources: ask for {expected}"
    else:
        return replace(job, cluster=measured_cluster, cluster_file=path)
    return replace(job, cluster=assumed, warning=f"{path} {fault}; it is not used")


def read_profile(job: Job, path: Path) -> Job:
    """Add the profile in ``path`` if it is up to date.

    Raises:
        DataFileError: the file cannot be read. It is for the user to remove it.
    """
    if path.exists():
        from pipectl.profile import Profile

        if is_fresh(job.spec, profile := Profile.load(path)):
            return job.with_profile(profile)
    return job


def measure_profile(job: Job, path: Path | None, progress: Progress | None = None) -> Job:
    """Add a new profile, which is written to ``path``.

    Raises:
        PipectlError: see :func:`pipectl.jobs.profiles.measure`.
    """
    from pipectl.jobs.profiles import measure

    profile = measure(job.spec, path, progress)
    return replace(job.with_profile(profile), is_profiled_now=True)


def is_fresh(spec: JobSpec, profile: Profile) -> bool:
    """Whether a profile is of this spec. A profile without a key was imported and is believed."""
    return profile.key is None or profile.key == profile_key(spec)


def read_plan(job: Job, path: Path) -> Job:
    """Add the plan in ``path`` if it is of the job's spec, profile and cluster.

    Raises:
        DataFileError: the file cannot be read.
    """
    if path.exists():
        from pipectl.plan import Plan

        if (plan := Plan.load(path)).key == job.plan_file_key:
            return replace(job, plan=plan)
    return job


def make_plan(job: Job, progress: Progress | None = None) -> Job:
    """Add a new plan, which has as many micro-batches as the last one of the job if possible.

    See :func:`pipectl.jobs.planning.kept_micro_batches`.

    Raises:
        InfeasibleError: no plan fits.
    """
    if progress is not None:
        progress(0, 0, "planning")
    from pipectl.jobs.planning import kept_micro_batches, plan_job

    return replace(job, plan=plan_job(job, kept_micro_batches(job.spec)))


def cluster_file_key(spec: JobSpec, scheduler: str) -> str:
    """Key in the file of a measured cluster: a hash of everything that its links depend on.

    The links of a local job are those of this host.
    """
    host = socket.gethostname() if scheduler == LOCAL else ""
    return links_key(spec, f"{scheduler} {host}")


def change(spec: JobSpec, **sections: Mapping[str, object]) -> JobSpec:
    """The spec with other values in sections, e.g. ``launch={"mpi": "pmix"}``, not validated."""
    new = {
        name: getattr(spec, name).model_copy(update=dict(values))
        for name, values in sections.items()
    }
    return spec.model_copy(update=new)


def move_to(run: RunDirectory, spec: JobSpec) -> JobSpec:
    """The spec with the directory that contains a run as its output directory."""
    return change(spec, output={"directory": str(run.path.parent.absolute())})


def memory_of_this_machine() -> int:
    """In bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def make_request(
    job: Job,
    directory: Path | None = None,
    *,
    tag: str | None = None,
    after: tuple[str, ...] = (),
    mpiexec: str | None = None,
    array: Array | None = None,
) -> JobRequest:
    """Make the request to a batch system for one run of a job, or for a job array of several.

    For the arguments see :class:`JobRequest`. The default directory does not exist and serves
    checks only.
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
    environment = {"variables": variables, "container": spec.container}
    return JobRequest(
        name=job.name,
        tag=tag or f"{directory.name} {uuid.uuid4().hex[:8]}",
        run_directory=directory,
        python=python,
        command=(python, *job.program, str(directory), *job.arguments),
        resources=spec.resources.model_copy(update=job.resources),
        launch=spec.launch.model_copy(update={"mpi": job.mpi_choice.mpi or spec.launch.mpi}),
        environment=spec.environment.model_copy(update=environment),
        slurm=spec.slurm,
        pbs=spec.pbs,
        checkpoint=spec.checkpoint if job.kind == TRAINING else None,
        earlier_starts=read_starts(RunDirectory(directory)),
        alone=job.alone,
        first_command=(python, "-m", IN_JOB, str(directory)) if job.plans_in_job else (),
        binds=() if spec.container is None else _binds(spec, directory.parent, job.output),
        mpiexec=mpiexec,
        after=after,
        template=job.template,
        array=array,
    )


def render(job: Job, now: float = 0.0, count: int = 0, at_once: int | None = None) -> str:
    """Render the script of a job as if it were submitted, without a batch system or MPI.

    Args:
        job: the job, or the first job of a sweep.
        now: seconds since the epoch, for the name of the run.
        count: number of runs of a sweep, for the script of its job array.
        at_once: maximum number of runs at the same time; None sets no limit.
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
    """Raise an InvalidInputError if the job's template, if any, cannot be rendered."""
    if spec.template_file is not None:
        job = Job(spec, choose_scheduler(spec), MpiChoice("auto"), read_template(spec))
        plain = {"launcher": "mpiexec", "bind": "none"}
        request = make_request(job, mpiexec="mpiexec").update(launch=plain)
        get_scheduler(job.scheduler).render(request)


def read_template(spec: JobSpec) -> Template | None:
    """Read the user's template of job scripts; None if the job names none.

    Raises:
        SpecError: the template cannot be read or used; names the line.
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
    """Directories that a container needs: the runs, and all files that the spec names.

    A job that profiles in its allocation writes the profile beside its run directory.
    """
    code = [reference for _, reference in spec.factories()]
    files = (*(one.file for one in code), spec.weights_path, spec.cluster_file, spec.schedule_file)
    needed = {path.parent for path in files if path is not None}
    needed |= {one.root for one in code if one.root is not None}
    further = () if output is None else (output,)
    return tuple(dict.fromkeys((runs, *sorted(needed), *further)))


def refuse_code_of_others(spec: JobSpec, job: Path) -> None:
    """Raise a UsageError if another user could have written a job's code or its file."""
    if fault := _code_of_others(spec, job):
        raise UsageError(
            f"{fault}, and its code would run as you",
            cure="read what it does; then add --trust-owner",
        )


def warning_of_code(spec: JobSpec, job: Path) -> str:
    """A warning if another user owns the code of a job; empty if not."""
    fault = _code_of_others(spec, job, groups=False)
    return f"{fault}; its code runs as you" if fault else ""


def _code_of_others(spec: JobSpec, job: Path, *, groups: bool = True) -> str:
    """The first file of a job's code that another user can write, and why; empty if none.

    For a module, this includes the directories that it imports from, and its missing files. With
    ``groups``, write permission of a group counts.
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
