"""The request for a job, independent of the batch system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipectl.spec.launch import Environment, Launch, Pbs, Resources, Slurm
    from pipectl.spec.models import Checkpoint
    from pipectl.units import NodeRange

CHECKPOINTED = 75
"""Exit code of a job script whose ranks stopped at a checkpoint before the last step."""
WORKER = "pipectl.runtime.worker"
"""The module that the ranks of a training run."""
IN_JOB = "pipectl.jobs.in_job"
"""The module that profiles and plans in a job's allocation."""
_MIN_WALLTIME_PER_LEAD_TIME = 4
_START_LIMITS, _FETCH_S = 10, 3600
"""Time for the ranks to appear, in units of ``launch.hang_after``, and to fetch an image."""


@dataclass(frozen=True)
class Array:
    """Runs submitted as one job array; each has its own script.

    Args:
        runs: absolute directories of the runs in the order of their array indices.
        at_once: maximum number of runs at the same time; None for no limit.
    """

    runs: tuple[Path, ...]
    at_once: int | None = None


@dataclass(frozen=True)
class JobRequest:
    """One job, independent of the batch system.

    Args:
        name: job name, see :func:`pipectl.units.is_name`.
        tag: unique text by which a job is found after an interrupted submission.
        run_directory: absolute, on a file system shared by all nodes.
        python: absolute path of the interpreter that submits.
        command: command of each rank, started under MPI.
        launch: with the kind of MPI that was chosen; ``auto`` only for mpiexec, if it is not known.
        environment: its container has the runtime that was chosen.
        checkpoint: None for jobs that cannot continue from a checkpoint.
        earlier_starts: how often the job script of the run was started before this submission.
        single_process: whether to start the command once, on the first node, without MPI.
        first_command: command that runs once, on the first node, before the launch.
        binds: host directories that the container sees under the same names.
        mpiexec: path of mpiexec; by default that of :func:`pipectl.batch.launchers.find_mpiexec`.
        after: ids of jobs that must complete first.
        cluster: cluster of the run's earlier job, to which the next one goes unless the spec names
            another.
        hash_seed: of Python, in all processes of the job.
        array: None for a single job. For an array, ``run_directory`` is the sweep's, the resources
            are those of each job, and ``command`` starts the runs if there is no batch system.
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
    earlier_starts: int = 0
    single_process: bool = False
    first_command: tuple[str, ...] = ()
    binds: tuple[Path, ...] = ()
    mpiexec: str | None = None
    after: tuple[str, ...] = ()
    cluster: str = ""
    hash_seed: int = 0
    array: Array | None = None

    @property
    def ranks(self) -> int:
        """Number of processes; the most, if the nodes are a range."""
        return 1 if self.single_process else self.resources.ranks

    @property
    def node_range(self) -> NodeRange | None:
        """The nodes of a job that takes as many as it gets; None if their number is fixed."""
        return None if self.single_process else self.resources.node_range

    @property
    def has_several_nodes(self) -> bool:
        """Whether it may have ranks on more than one node."""
        return not self.single_process and self.resources.max_nodes > 1

    @property
    def threads(self) -> int:
        """Compute threads per rank."""
        return self.launch.threads(self.resources.cpus_per_task)

    @property
    def memory_per_node_mib(self) -> int | None:
        """``resources.memory_per_node`` rounded up to MiB."""
        size = self.resources.memory_per_node
        return None if size is None else -(-size // 2**20)

    @property
    def lead_time_s(self) -> int:
        """Seconds from the signal to save a checkpoint to the end of the walltime."""
        limit = self.resources.walltime // _MIN_WALLTIME_PER_LEAD_TIME
        return 0 if self.checkpoint is None else min(self.checkpoint.lead_time, limit)

    @property
    def start_limit_s(self) -> int:
        """Seconds after which a launcher without a rank is ended: more ranks start more slowly,
        and a container may have to be fetched first."""
        container = self.environment.container
        fetch_s = _FETCH_S if container is not None and container.is_fetched else 0
        return _START_LIMITS * self.launch.hang_after + self.ranks + fetch_s

    @property
    def max_starts(self) -> int | None:
        """Maximum of the starts of the run that its script counts; None if it never starts again
        by itself."""
        if self.checkpoint is None or not self.checkpoint.max_requeues:
            return None
        return self.earlier_starts + 1 + self.checkpoint.max_requeues

    @property
    def launcher(self) -> str:
        """The launcher of the ranks: ``mpiexec``, or srun if it has to start their container,
        unless the job names another."""
        if self.launch.launcher != "auto":
            return self.launch.launcher
        container = self.environment.container
        return "srun" if container is not None and container.by_srun else "mpiexec"

    @property
    def container_program(self) -> str:
        """The program that starts the job's container; empty if there is none."""
        container = self.environment.container
        return "" if container is None or container.by_srun else container.runtime

    def has_variable(self, *prefixes: str) -> bool:
        """Return whether a name in ``environment.variables`` has one of the prefixes."""
        return any(name.startswith(prefixes) for name in self.environment.variables)

    @property
    def sets_hydra_launcher(self) -> bool:
        """Whether the job sets how MPICH's mpiexec starts processes on other nodes."""
        options = ("-launcher", "-bootstrap")
        return self.has_variable("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP") or any(
            word.startswith(options) for word in self.launch.args
        )
