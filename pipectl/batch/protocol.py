"""What every batch system offers, and the plain data that goes in and comes out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pipectl.directives import Value
from pipectl.errors import InvalidInputError


class JobState(StrEnum):
    """The state of a job, the same words for every batch system."""

    QUEUED = "QUEUED"
    HELD = "HELD"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    UNKNOWN = "UNKNOWN"

    @property
    def waits(self) -> bool:
        """Whether the job has yet to start, maybe once more."""
        return self in {JobState.QUEUED, JobState.HELD}

    @property
    def final(self) -> bool:
        """Whether the job is over for good; UNKNOWN is not."""
        return not self.waits and self not in _NOT_OVER

    @property
    def alive(self) -> bool:
        """Whether the job still waits or runs; UNKNOWN does not count."""
        return not self.final and self is not JobState.UNKNOWN


_NOT_OVER = {JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING, JobState.UNKNOWN}


@dataclass(frozen=True)
class JobStatus:
    """What is known about one job.

    Args:
        reason: why it is in this state, in the source's words; empty if it gives none.
        exit_code: of the job script, if known.
        nodes: host list in the batch system's notation; empty before the start.
        start, end: seconds since the epoch; before the start ``start`` is a forecast, and ``end``
            is there for final states only.
        source: who says so: ``queue``, ``accounting``, ``process``, ``run directory``,
            ``heartbeat``, ``record`` or ``none``.
    """

    state: JobState
    reason: str = ""
    exit_code: int | None = None
    nodes: str = ""
    start: float | None = None
    end: float | None = None
    source: str = "queue"


@dataclass(frozen=True)
class Queue:
    """A partition of Slurm or queue of PBS; None and 0 stand for what is not known.

    Args:
        default: whether jobs that name none go there.
        open: whether it takes jobs and runs them.
        walltime_s: the longest walltime of a job.
        nodes: in all.
        cores, memory_bytes, gpus: per node; the smallest, if they differ.
    """

    name: str
    default: bool = False
    open: bool = True
    walltime_s: int | None = None
    nodes: int = 0
    cores: int = 0
    memory_bytes: int | None = None
    gpus: int = 0


@dataclass(frozen=True)
class Container:
    """Where commands of a job run: Apptainer, which was Singularity.

    Args:
        image: path of an image, or an address such as ``docker://…``; its ``python3`` has torch,
            mpi4py and pipectl.
        binds: directories of the host that it sees under the same names.
        accelerators: whether it sees those of the node.
    """

    image: str
    binds: tuple[Path, ...] = ()
    accelerators: bool = False

    def wrap(self, words: tuple[str, ...], python: str) -> tuple[str, ...]:
        """The command that runs ``words`` within the container.

        Args:
            python: of the host; the container's runs instead.

        Raises:
            InvalidInputError: a directory cannot be named to Apptainer.
        """
        for path in self.binds:
            if re.search("[,:]", str(path)):
                raise InvalidInputError(
                    f"environment.container: {path} holds a comma or colon, which Apptainer would "
                    "take for the end of its name",
                    cure="choose a directory without one",
                )
        options = (*("--nv",) * self.accelerators, *(f"--bind={path}" for path in self.binds))
        program = "python3" if words[0] == python else words[0]
        return ("apptainer", "exec", *options, self.image, program, *words[1:])

    def with_directory(self, directory: Path) -> Container:
        """The same, which sees one directory more."""
        return replace(self, binds=tuple(dict.fromkeys((*self.binds, directory))))


@dataclass(frozen=True)
class Template:
    """A user's own job script: a Jinja template that extends ours.

    Args:
        file: its path, for messages.
    """

    file: str
    text: str


@dataclass(frozen=True)
class SlurmOptions:
    """What only Slurm knows.

    Args:
        options: further ones of sbatch; pipectl writes none of these itself.
    """

    partition: str | None = None
    account: str | None = None
    options: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class PbsOptions:
    """What only PBS knows.

    Args:
        select: appended to the resources of each node, such as ``model=icelake``.
        options: further ones of qsub, by letter.
    """

    queue: str | None = None
    account: str | None = None
    select: str | None = None
    options: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Stop:
    """How a job is asked to save what it has and end, before its time is over.

    Args:
        lead_time_s: between the signal USR2 to the job script and the end of the walltime.
        requeues: up to which start of the run the batch system may start the job again after that,
            or after the failure of a node.
    """

    lead_time_s: int = 180
    requeues: int = 0


@dataclass(frozen=True)
class Array:
    """Runs that are submitted as one job array; each has a script of its own.

    Args:
        runs: their directories, absolute; where a run stands here is its place in the array.
        at_once: how many may run at the same time; None sets no limit.
    """

    runs: tuple[Path, ...]
    at_once: int | None = None


@dataclass(frozen=True)
class JobRequest:
    """One job, independent of the batch system.

    Args:
        name: job name, see :func:`pipectl.units.is_name`.
        tag: unique text by which the job is found again when its submission was interrupted.
        run_directory: absolute; on a file system that every node sees.
        python: absolute path of the interpreter that submits.
        ranks: processes in all, at most as many as the tasks on all nodes.
        command: of one rank, started ``ranks`` times under MPI.
        alone: whether the command is started once, on the first node, without MPI.
        prepare: commands run once, on the first node, before the launch.
        modules, setup: loaded, and run verbatim, before anything else.
        variables: exported to every rank.
        threads_per_task: with which ranks compute; None for one on each of their cores.
        launcher: ``mpiexec``, ``srun`` or ``auto``.
        mpi: for srun its ``--mpi``; for mpiexec whose it is, see :mod:`pipectl.batch.launchers`;
            ``auto`` if that is not known.
        bind: ``cores`` binds each rank to its own, ``numa`` to a domain, ``none`` to nothing.
        launch_args: appended to the launcher's options.
        mpiexec: path of mpiexec; None takes the one beside ``python``, else the first on PATH.
        stop: None for jobs that cannot go on where they stopped.
        after: ids of jobs of the same batch system that must have completed before.
        container: in which ``prepare`` and the ranks run; the launcher stays outside.
        template: the user's own; None for none.
        array: None for a single job. For an array ``run_directory`` is that of the sweep, the
            resources are those of every job, and ``command`` starts the runs on this machine,
            where no batch system does.
    """

    name: str
    tag: str
    run_directory: Path
    python: str
    ranks: int
    nodes: int
    tasks_per_node: int
    walltime_s: int
    command: tuple[str, ...]
    cpus_per_task: int = 1
    threads_per_task: int | None = None
    gpus_per_node: int = 0
    memory_per_node_bytes: int | None = None
    prepare: tuple[tuple[str, ...], ...] = ()
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    launcher: str = "auto"
    mpi: str = "auto"
    bind: str = "none"
    launch_args: tuple[str, ...] = ()
    mpiexec: str | None = None
    stop: Stop | None = None
    alone: bool = False
    after: tuple[str, ...] = ()
    container: Container | None = None
    template: Template | None = None
    array: Array | None = None
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    pbs: PbsOptions = field(default_factory=PbsOptions)

    @property
    def threads(self) -> int:
        """Threads that each rank computes with."""
        return self.threads_per_task or self.cpus_per_task

    @property
    def memory_per_node_mib(self) -> int | None:
        """``memory_per_node_bytes`` rounded up to MiB."""
        size = self.memory_per_node_bytes
        return None if size is None else -(-size // 2**20)

    @property
    def changes_path(self) -> bool:
        """Whether the job may find other programs than the command that submits it."""
        own = self.modules or self.setup or self.template or "PATH" in self.variables
        return bool(own)

    def has_variable(self, *beginnings: str) -> bool:
        """Whether ``environment.variables`` has one whose name begins with one of these."""
        return any(name.startswith(beginnings) for name in self.variables)

    def in_container(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """A command of the job as it is started: in its container, if it has one."""
        return words if self.container is None else self.container.wrap(words, self.python)


class Scheduler(Protocol):
    """A batch system. Every method raises SchedulerError when the system fails or refuses."""

    name: str

    def render(self, request: JobRequest) -> str:
        """The job script; InvalidInputError if the request cannot be written down safely."""

    def submit(self, script: Path, request: JobRequest) -> str:
        """Hand the script over and return the job's id."""

    def task_id(self, array_id: str, index: int) -> str:
        """The id of one job of an array, whose own id is what ``submit`` or ``find`` gave."""

    def array_id(self, task_id: str) -> str:
        """The id by which ``cancel`` ends all jobs of an array; else that of the job itself."""

    def query(self, ids: Sequence[str], *, since: float | None = None) -> Mapping[str, JobStatus]:
        """States by id; ids that the system does not know are absent, which proves nothing.

        Args:
            since: earliest submission among the jobs, seconds since the epoch; keeps an old job
                with a recycled id from being taken for ours.
        """

    def cancel(self, job_id: str) -> None:
        """Ask for the end of a job; ids that are already gone are no error."""

    def estimate(self, script: Path) -> str | None:
        """When the job would start, in the system's words; None if it cannot tell."""

    def find(self, tag: str) -> str | None:
        """The id of the job submitted with this tag, for submissions that were interrupted."""

    def queues(self) -> tuple[Queue, ...]:
        """Partitions or queues, the default first; none if the system has none."""
