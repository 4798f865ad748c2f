"""What batch systems have in common: their interface and its data."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pipectl.errors import InvalidInputError

if TYPE_CHECKING:
    from pipectl.spec.models import Checkpoint, Environment, Launch, Pbs, Resources, Slurm

CHECKPOINTED = 75
"""Exit code of a job script whose ranks stopped at a checkpoint before they were done."""
_MIN_WALLTIME_PER_LEAD_TIME = 4


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
class Template:
    """A user's own job script, a Jinja template that extends ours, and its path for messages."""

    file: str
    text: str


@dataclass(frozen=True)
class Array:
    """Runs that are submitted as one job array; each has a script of its own.

    Args:
        runs: their directories, absolute, in the order of their indices in the array.
        at_once: how many may run at the same time; None sets no limit.
    """

    runs: tuple[Path, ...]
    at_once: int | None = None


@dataclass(frozen=True)
class JobRequest:
    """One job, independent of the batch system: sections of a job spec, and what a run adds.

    Args:
        name: job name, see :func:`pipectl.units.is_name`.
        tag: unique text by which the job is found again if its submission was interrupted.
        run_directory: absolute; on a file system that every node sees.
        python: absolute path of the interpreter that submits.
        command: of one rank, started under MPI once for each rank.
        environment: its container is an absolute path or an address.
        checkpoint: its ``lead_time``, and its ``max_requeues``, which counts all starts of the run;
            None for jobs that cannot go on where they stopped.
        alone: whether the command is started once, on the first node, without MPI.
        first_command: a command that runs once, on the first node, before the launch.
        binds: directories of the host that the container sees under the same names.
        mpiexec: path of mpiexec; None takes the one beside ``python``, else the first on PATH.
        after: ids of jobs of the same batch system that must have completed before.
        array: None for a single job. For an array, ``run_directory`` is that of the sweep, the
            resources are those of every job, and ``command`` starts the runs on this machine,
            where no batch system does.
    """

    name: str
    tag: str
    run_directory: Path
    python: str
    command: tuple[str, ...]
    resources: Resources
    launch: Launch
    environment: Environment
    slurm: Slurm
    pbs: Pbs
    checkpoint: Checkpoint | None = None
    alone: bool = False
    first_command: tuple[str, ...] = ()
    binds: tuple[Path, ...] = ()
    mpiexec: str | None = None
    after: tuple[str, ...] = ()
    template: Template | None = None
    array: Array | None = None

    def update(self, **sections: Mapping[str, object]) -> JobRequest:
        """The same with other values in its sections, such as ``update(launch={"mpi": "pmix"})``.

        The values are not validated.
        """
        new = {
            name: getattr(self, name).model_copy(update=dict(values))
            for name, values in sections.items()
        }
        return replace(self, **new)

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return 1 if self.alone else self.resources.ranks

    @property
    def threads(self) -> int:
        """Threads that each rank computes with."""
        return self.resources.cpus_per_task - self.launch.spare_cores

    @property
    def memory_per_node_mib(self) -> int | None:
        """``resources.memory_per_node`` rounded up to MiB."""
        size = self.resources.memory_per_node
        return None if size is None else -(-size // 2**20)

    @property
    def lead_time_s(self) -> int:
        """Seconds between the signal to save a checkpoint and the end of the walltime."""
        limit = self.resources.walltime // _MIN_WALLTIME_PER_LEAD_TIME
        return 0 if self.checkpoint is None else min(self.checkpoint.lead_time, limit)

    @property
    def changes_path(self) -> bool:
        """Whether the job may find other programs on its PATH than `pipectl submit` does."""
        job = self.environment
        return bool(job.modules or job.setup or self.template or "PATH" in job.variables)

    def has_variable(self, *prefixes: str) -> bool:
        """Whether ``environment.variables`` has one whose name begins with one of these."""
        return any(name.startswith(prefixes) for name in self.environment.variables)

    @property
    def sets_hydra_launcher(self) -> bool:
        """Whether the job itself says how MPICH's mpiexec starts processes on other nodes."""
        options = ("-launcher", "-bootstrap")
        return self.has_variable("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP") or any(
            word.startswith(options) for word in self.launch.args
        )

    def in_container(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """A command of the job as it is started: by Apptainer, if the job has a container, whose
        Python runs instead of the host's.

        Raises:
            InvalidInputError: a directory cannot be named to Apptainer.
        """
        image = self.environment.container
        if image is None:
            return words
        for path in self.binds:
            if re.search("[,:]", str(path)):
                raise InvalidInputError(
                    f"environment.container: {path} contains a comma or colon, which Apptainer "
                    "takes for the end of the name",
                    cure="choose a directory without one",
                )
        accelerators = ("--nv",) * (self.resources.gpus_per_node > 0)
        binds = (f"--bind={path}" for path in self.binds)
        program = "python3" if words[0] == self.python else words[0]
        return ("apptainer", "exec", *accelerators, *binds, image, program, *words[1:])


class Scheduler(ABC):
    """A batch system. Every method raises SchedulerError when the system fails or refuses."""

    name: ClassVar[str]
    title: ClassVar[str]
    """Its name for people."""
    resubmits: ClassVar[bool] = False
    """Whether job scripts submit themselves again, instead of being requeued."""

    def ping(self) -> None:  # noqa: B027
        """Ask for something that costs the system little, to see whether it answers."""

    def render(self, request: JobRequest) -> str:
        """The job script, of the template called as the system.

        Raises:
            PipectlError: see :func:`pipectl.batch.script.render_script`.
        """
        from pipectl.batch.script import render_script

        return render_script(
            f"{self.name}.sh.j2", request, self.name, **self._template_values(request)
        )

    def _template_values(self, request: JobRequest) -> Mapping[str, str]:  # noqa: ARG002
        """Further variables of the template; refuses what the system cannot run."""
        return {}

    @abstractmethod
    def submit(self, script: Path, request: JobRequest) -> str:
        """Hand the script over and return the job's id."""

    @abstractmethod
    def task_id(self, array_id: str, index: int) -> str:
        """The id of one job of an array, from the id that ``submit`` or ``find`` returned."""

    def array_id(self, task_id: str) -> str:
        """The id by which ``cancel`` ends all jobs of an array; else that of the job itself."""
        return task_id

    def dependency_id(self, task_id: str) -> str:
        """The id by which other jobs wait for the end of this one: that of its whole array, if
        nothing can wait for one job of it."""
        return task_id

    @abstractmethod
    def query(self, ids: Sequence[str], *, since: float | None = None) -> Mapping[str, JobStatus]:
        """States by id; ids that the system does not know are absent, which proves nothing.

        Args:
            since: earliest submission among the jobs, seconds since the epoch; keeps an old job
                with a recycled id from being taken for ours.
        """

    @abstractmethod
    def cancel(self, job_id: str) -> None:
        """Ask for the end of a job; ids that are already gone are no error."""

    def estimate(self, script: Path) -> str | None:  # noqa: ARG002
        """When the job would start, in the system's words; None if it cannot tell."""
        return None

    @abstractmethod
    def find(self, tag: str) -> str | None:
        """The id of the job submitted with this tag, for submissions that were interrupted."""

    def queues(self) -> tuple[Queue, ...]:
        """Partitions or queues, the default first; none if the system has none."""
        return ()
