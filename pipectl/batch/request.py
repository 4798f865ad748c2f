"""A job as a batch system is given it: sections of a job spec, and what a run adds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.errors import InvalidInputError

if TYPE_CHECKING:
    from pipectl.spec.models import Checkpoint, Environment, Launch, Pbs, Resources, Slurm

_MIN_WALLTIME_PER_LEAD_TIME = 4


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
