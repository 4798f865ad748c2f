"""A job before it is submitted, and its request to the batch system.

    JobSpec -> Job -> Submission -> RunDirectory -> RunStatus

:func:`make_job` makes a `Job`; :func:`pipectl.jobs.prepare.prepare` adds its cluster, profile and
plan.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.batch import (
    HERE,
    LOCAL,
    Array,
    JobRequest,
    OtherSystemError,
    find_scheduler,
    get_scheduler,
    scheduler_class,
)
from pipectl.batch.containers import choose_runtime
from pipectl.batch.edited import DRY_RUN
from pipectl.batch.launchers import AUTO, MpiChoice, choose_mpi, find_mpiexec
from pipectl.batch.request import IN_JOB, WORKER
from pipectl.cluster import Cluster
from pipectl.errors import SchedulerError, UsageError
from pipectl.hash_seed import VARIABLE, hash_seed_of
from pipectl.jobs.mounts import mounts_of
from pipectl.runs import TRAINING, RunDirectory, SweepDirectory, read_starts, stem_of
from pipectl.runs.code import Code
from pipectl.spec import JobSpec
from pipectl.spec.types import WithoutUnit

if TYPE_CHECKING:
    from pipectl.plan import Plan
    from pipectl.profile import Profile
    from pipectl.rehearsal import Rehearsal

PERCENT = 100
"""Steps of a run that only measures: it reports its progress in percent."""


@dataclass(frozen=True)
class Workload:
    """What the ranks of a job do. By default they train.

    Args:
        kind: see :class:`pipectl.runs.Record`.
        suffix: appended to the name of the job to name the run.
        program: arguments of Python before the run directory; ``arguments`` come after it.
        steps: number of steps; None for those of the training.
        single_process: whether it is one process, without MPI.
        resources: values that replace those of the spec.
        output: directory that it writes to besides its run directory.
    """

    kind: str = TRAINING
    suffix: str = ""
    program: tuple[str, ...] = ("-m", "mpi4py", "-m", WORKER, "--run")
    arguments: tuple[str, ...] = ()
    steps: int | None = None
    single_process: bool = False
    resources: Mapping[str, int] = field(default_factory=dict)
    output: Path | None = None


@dataclass(frozen=True)
class Job:
    """A job as its spec describes it, and what it is planned and trained with.

    Args:
        scheduler: name of the batch system.
        mpi: how the ranks are started, and why.
        values: values of the job's point of the sweep, by dotted key; None without a sweep.
        cluster: the machines to plan for; None if the job only measures.
        cluster_warning: why a measured cluster is not used; may be empty.
        profile: None if the job measures its model itself, or needs no profile.
        plan: None if the job plans itself, or needs no plan.
        plans: of a job with a range of nodes, by number of nodes; ``plan`` is one of them, and
            ``cluster`` has all nodes.
        plans_in_job: whether the job profiles and plans in its allocation before it trains.
        has_new_profile: whether the profile was measured, or found in the cache, by this process.
        rehearsal: None unless the job rehearses its plan.
        code: the user's code that it runs; None to read it at submission.
        keeps_code: whether the run gets copies of the code, and a record of the environment.
    """

    spec: JobSpec
    scheduler: str
    workload: Workload
    mpi: MpiChoice
    values: Mapping[str, Any] | None = None
    cluster: Cluster | None = None
    cluster_warning: str = ""
    profile: Profile | None = None
    plan: Plan | None = None
    plans: Mapping[int, Plan] = field(default_factory=dict)
    plans_in_job: bool = False
    has_new_profile: bool = False
    rehearsal: Rehearsal | None = None
    code: Code | None = None
    keeps_code: bool = True

    @property
    def name(self) -> str:
        """Name in the batch system, with which the names of its runs end."""
        return f"{self.spec.name}{self.workload.suffix}"

    def request_for(
        self,
        directory: Path,
        *,
        tag: str | None = None,
        after: tuple[str, ...] = (),
        mpiexec: str | None = None,
    ) -> JobRequest:
        """The request to the batch system for the run in a directory; for the arguments see
        :class:`JobRequest`."""
        directory, python = directory.absolute(), sys.executable
        spec, workload = self.spec, self.workload
        given = spec.environment.variables.items()
        # The script exports the hash seed for all its processes.
        environment = {"variables": {name: text for name, text in given if name != VARIABLE}}
        # With a range of nodes, every start takes the plan for what it gets.
        prepares = self.plans_in_job or spec.resources.node_range is not None
        return JobRequest(
            name=self.name,
            tag=tag or f"{directory.name} {uuid.uuid4().hex[:8]}",
            run_directory=directory,
            python=python,
            command=(python, *workload.program, str(directory), *workload.arguments),
            resources=spec.resources.model_copy(update=workload.resources),
            launch=spec.launch.model_copy(update={"mpi": self.mpi.kind}),
            environment=spec.environment.model_copy(update=environment),
            slurm=spec.slurm,
            pbs=spec.pbs,
            checkpoint=spec.checkpoint if workload.kind == TRAINING else None,
            single_process=workload.single_process,
            first_command=(python, "-m", IN_JOB, str(directory)) if prepares else (),
            earlier_starts=read_starts(RunDirectory(directory)),
            binds=mounts_of(spec, directory.parent, workload.output),
            mpiexec=mpiexec,
            after=after,
            hash_seed=hash_seed_of(spec.environment.variables),
        )

    def array_request(
        self,
        sweep: SweepDirectory,
        runs: int,
        at_once: int | None,
        *,
        tag: str | None = None,
        after: tuple[str, ...] = (),
    ) -> JobRequest:
        """The request for the job array of a sweep whose first job this is.

        Args:
            runs: number of its runs.
            at_once: maximum number of runs at the same time; None sets no limit.
            tag, after: see :class:`JobRequest`.
        """
        request = self.request_for(sweep.path, tag=tag, after=after)
        # The program for a machine without a batch system.
        program = ("-m", "pipectl.jobs.sweep", str(sweep.path), str(at_once or 1))
        return replace(
            request,
            command=(request.python, *program),
            first_command=(),
            array=Array(tuple(sweep.run(index).path for index in range(runs)), at_once),
        )


def make_job(
    spec: JobSpec,
    scheduler: str,
    workload: Workload | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    mpi: MpiChoice | None = None,
) -> Job:
    """Make a job, and choose how its ranks are started.

    Args:
        workload: None for training.
        mpi: the choice for another job with the same launch settings and environment.

    """
    workload = workload or Workload()
    spec = with_hash_seed(spec, hash_seed_of(spec.environment.variables))
    if workload.kind != TRAINING:
        spec = with_count(spec, spec.resources.max_nodes)
    if spec.environment.container is not None:
        container = choose_runtime(spec.environment.container)
        spec = change(spec, environment={"container": container})
    if mpi is None:
        mpi = choose_mpi(spec.launch, spec.environment, single_process=workload.single_process)
    return Job(spec, scheduler, workload, mpi, values)


def choose_scheduler(spec: JobSpec, name: str | None = None, *, must_answer: bool = False) -> str:
    """Choose ``name``, or the spec's scheduler; ``auto`` is the installed batch system, if any.

    Args:
        must_answer: whether to raise a SchedulerError if the scheduler that ``auto`` chose does not
            answer: its commands may be installed on a machine without a batch system.

    Raises:
        UsageError: there is no batch system of this name, or the job's walltime has no unit and
            may mean something else there.
    """
    name = name or spec.launch.scheduler
    is_named = name != AUTO
    name = scheduler_class(name).name if is_named else find_scheduler()
    walltime = spec.resources.walltime
    if name == "pbs" and isinstance(walltime, WithoutUnit):
        what, _, hint = walltime.ambiguity.partition("; ")
        raise UsageError(f"resources.walltime: {what}", hint=hint)
    if is_named:
        return name
    if name == LOCAL or not must_answer:
        return name
    try:
        (system := get_scheduler(name)).ping()
    except OtherSystemError:
        raise
    except SchedulerError as error:
        raise SchedulerError(
            f"{system.title} is installed here, but does not answer: "
            f"{error.message.splitlines()[-1]}",
            hint="to train on this machine: --scheduler local\n"
            f"to submit anyway: --scheduler {name}",
        ) from error
    return name


def fit_to_allocation(spec: JobSpec, scheduler: str) -> JobSpec:
    """The spec with a number of nodes, where the batch system takes no range.

    A job in this allocation gets its nodes and tasks, unless the spec names some; of a range, as
    many as there are. On this machine, its cores say how many there are. All other systems are
    asked for the highest number.

    Raises:
        SchedulerError: this process runs in no allocation.
    """
    resources = spec.resources
    nodes = resources.node_range
    if scheduler == HERE:
        from pipectl.batch.here import find_allocation

        _, allocation = find_allocation()
        found = {"nodes": len(allocation.nodes), "tasks_per_node": allocation.tasks_per_node}
        given = resources.model_fields_set
        if nodes is not None:
            found["nodes"] = nodes.nearest(found["nodes"])
            given = given - {"nodes"}
        return change(spec, resources={key: n for key, n in found.items() if key not in given})
    if nodes is None or scheduler_class(scheduler).takes_range:
        return spec
    count = nodes.highest
    if scheduler == LOCAL:
        cores = 0 if resources.gpus_per_node else len(os.sched_getaffinity(0))
        count = nodes.nearest(cores // (resources.tasks_per_node * resources.cpus_per_task))
    return with_count(spec, count)


def render(job: Job, now: float = 0.0) -> str:
    """Render the script of a job; for the arguments see :func:`request_at`.

    The batch system is not called.

    Raises:
        PipectlError: see :meth:`pipectl.batch.Scheduler.render`.
    """
    return get_scheduler(job.scheduler).render(request_at(job, now))


def request_at(job: Job, now: float, *, needs_mpi: bool = True) -> JobRequest:
    """The request for a job, or the first run of a sweep, as if it were submitted now.

    Args:
        now: seconds since the epoch, for the name of the run.
        needs_mpi: whether to raise an error if there is no mpiexec to start the ranks with.
    """
    run = Path(job.spec.output.directory, stem_of(job.name, now))
    if job.values is not None:
        run = SweepDirectory.beside(run).run(0).path
    mpiexec = None
    if not needs_mpi:
        try:
            mpiexec = find_mpiexec(job.spec.environment)
        except SchedulerError:
            mpiexec = "mpiexec"
    return job.request_for(run, tag=f"{run.name} {DRY_RUN}", mpiexec=mpiexec)


def render_array(job: Job, runs: int, at_once: int | None, now: float) -> str:
    """Render the script of the job array of a sweep; for the arguments see
    :meth:`Job.array_request` and :func:`request_at`."""
    sweep = SweepDirectory.beside(Path(job.spec.output.directory, stem_of(job.name, now)))
    request = job.array_request(sweep, runs, at_once, tag=f"{sweep.name} {DRY_RUN}")
    return get_scheduler(job.scheduler).render(request)


def with_count(spec: JobSpec, nodes: int) -> JobSpec:
    """The spec with a number of nodes in place of a range."""
    return change(spec, resources={"nodes": nodes})


def change(spec: JobSpec, **sections: Mapping[str, object]) -> JobSpec:
    """The spec with other values in sections, e.g. ``launch={"mpi": "pmix"}``, not validated."""
    changed = {
        name: getattr(spec, name).model_copy(update=dict(values))
        for name, values in sections.items()
    }
    return spec.model_copy(update=changed)


def with_hash_seed(spec: JobSpec, seed: int) -> JobSpec:
    """The spec with a hash seed among its variables, unless it has that seed without."""
    before = spec.environment.variables
    variables = {name: text for name, text in before.items() if name != VARIABLE}
    if hash_seed_of(variables) != seed:
        variables[VARIABLE] = str(seed)
    return spec if variables == before else change(spec, environment={"variables": variables})


def with_output_beside(run: RunDirectory, spec: JobSpec) -> JobSpec:
    """The spec with the directory that contains a run as its output directory."""
    return change(spec, output={"directory": str(run.path.parent.absolute())})
