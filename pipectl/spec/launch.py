"""The sections of a job spec that say where a job runs and how its ranks start."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from pipectl.spec import types
from pipectl.units import NodeRange


class Resources(types.Section):
    """What the job asks for, under every scheduler."""

    nodes: types.Nodes = 1
    """Nodes: a number, or a range such as `2-8`, of which every start of the job uses
    [what it gets](reliability.md#a-range-of-nodes)."""
    tasks_per_node: types.Count = 1
    """MPI ranks per node."""
    cpus_per_task: types.Count = 1
    """Cores per rank, which computes with as many threads (see `launch.progress: core`)."""
    gpus_per_node: types.Natural = 0
    """Accelerators per node. If above 0, ranks compute on them, and the job fails if
    torch finds none (`pipectl doctor` says what it finds)."""
    memory_per_node: types.Bytes | None = None
    """Memory per node; by default what the scheduler gives."""
    walltime: types.Walltime = 3600
    """Time after which the batch system ends the job; `local` jobs have no limit. A number without
    a unit is minutes, as for `sbatch --time`."""

    @property
    def node_range(self) -> NodeRange | None:
        """The range of nodes; None if their number is fixed."""
        return self.nodes if isinstance(self.nodes, NodeRange) else None

    @property
    def min_nodes(self) -> int:
        """The number of nodes, or the lowest of the range."""
        return self.nodes.lowest if isinstance(self.nodes, NodeRange) else self.nodes

    @property
    def max_nodes(self) -> int:
        """The number of nodes, or the highest of the range."""
        return self.nodes.highest if isinstance(self.nodes, NodeRange) else self.nodes

    @property
    def ranks(self) -> int:
        """MPI ranks of the job; the most that it can have if its nodes are a range."""
        return self.max_nodes * self.tasks_per_node

    def memory_per_rank(self, node_bytes: int | None = None) -> int | None:
        """A rank's share of its node's memory in bytes; None if that is not known, or if ranks
        compute in the memory of accelerators.

        Args:
            node_bytes: memory of a node, which counts if ``memory_per_node`` is not given.
        """
        if self.memory_per_node is not None:
            node_bytes = self.memory_per_node
        if node_bytes is None or self.gpus_per_node:
            return None
        return node_bytes // self.tasks_per_node

    @property
    def shares_machine_memory(self) -> bool:
        """Whether the memory of a node limits its ranks: the job names no memory, and ranks do not
        compute in the memory of accelerators."""
        return self.memory_per_node is None and not self.gpus_per_node


class Launch(types.Section):
    """How the ranks are started."""

    scheduler: types.Scheduler = "auto"
    """`slurm`, `pbs`, the name of a batch system that a package adds, `local` for processes on this
    machine, or `here` for the allocation in which the command runs. `auto` is the system of such a
    package if its commands are found, else `slurm` if `sbatch` is found, else `pbs` if `qsub` is,
    else `local`."""
    options: types.Options = Field(default_factory=dict)
    """Options for the batch system of a package, which says what they are; other systems have
    sections of their own, and `local` ignores them."""
    launcher: Literal["auto", "srun", "mpiexec", "ibrun", "flux"] = "auto"
    """The command that starts the ranks; `auto` is `mpiexec`. `srun` and `ibrun` (TACC's) need
    Slurm; `flux` is `flux run`, within an allocation of Flux."""
    mpi: types.Text = "auto"
    """The value of `srun --mpi`, such as `pmix`, or of `flux run -o pmi`; or the kind of `mpiexec`:
    `hydra` (MPICH), `openmpi`, `intel` or `cray` (PALS). `auto` detects it at submission, if
    possible."""
    bind: Literal["none", "cores", "numa"] = "none"
    """Bind each rank to `cpus_per_task` cores of its own (`cores`), or to a memory domain of its
    node (`numa`)."""
    args: tuple[types.Text, ...] = ()
    """Further arguments of the launcher, verbatim."""
    progress: Literal["auto", "none", "thread", "core"] = "auto"
    """What moves messages while ranks compute: a `thread`, or `none` if MPI does so by itself;
    `auto` follows from the nodes, the size of the messages and what `pipectl profile --links`
    measured. With `core`, ranks compute with one thread less than they
    have cores, and leave that core to a thread for large messages, also in profiles."""
    gpu_aware: Literal["auto", "always", "never"] = "auto"
    """Whether MPI reads and writes the memory of accelerators directly: `always`, `never`, or
    `auto`: if MPI says that it can, and a test message arrives."""
    hang_after: types.Seconds = 30
    """How long a rank may be frozen, or its node silent, before the job is ended; at least three
    steps."""

    def threads(self, cpus_per_task: int) -> int:
        """Threads that a rank with these cores computes with."""
        return cpus_per_task - (self.progress == "core")


class Container(types.Section):
    """The container in which everything in the job runs except the launcher. Its `python3` must
    have torch, mpi4py and pipectl."""

    runtime: Literal[
        "auto", "apptainer", "singularity", "podman-hpc", "shifter", "pyxis", "cscs"
    ] = "auto"
    """The program that opens it, or `pyxis` (`srun --container-image`) or `cscs` (the Container
    Engine, `srun --environment`). `auto` follows from the image and from what is installed where
    `submit` runs, if that leaves one."""
    image: types.Image
    """A file such as `./torch.sif`, relative to the spec file; an address such as `docker://...`;
    or what the runtime calls it: `nersc/pytorch:24.06`, `nvcr.io#nvidia/pytorch:25.06-py3`, or the
    name of an environment definition file."""
    mounts: tuple[types.Mount, ...] = ()
    """Further directories that the container sees: `DIRECTORY`, or `DIRECTORY:TARGET` for another
    name. The directories of the runs and of the files that the job names are mounted anyway; see
    [containers](environment.md#in-a-container)."""
    args: tuple[types.Text, ...] = ()
    """Further options of the runtime, verbatim, such as `--rocm` or `--module=mpich`."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError("must be a mapping: write {image: ...}")
        return value

    @property
    def by_srun(self) -> bool:
        """Whether only srun can start processes in it."""
        return self.runtime in {"pyxis", "cscs"}

    @property
    def is_fetched(self) -> bool:
        """Whether its image may first have to be fetched: it is no file, or a file that may name an
        address."""
        return not self.image.startswith("/") or self.image.endswith(".toml")


class Environment(types.Section):
    """What the job script does before the ranks start."""

    inherit: Literal["none", "all"] = "none"
    """What a job of Slurm or PBS gets of the variables of the shell that submits it: `none`, and it
    begins as a login does, or `all`. On this machine, and in an allocation, jobs get all."""
    modules: tuple[types.Text, ...] = ()
    """Names for `module load`, in this order."""
    setup: tuple[str, ...] = ()
    """Shell code put into the job script verbatim, after the modules."""
    on_error: Literal["stop", "continue"] = "stop"
    """What a command of `setup` that fails does to the job: it ends it (`stop`) or does not
    (`continue`). With `stop`, write `COMMAND || true` where a failure does not matter."""
    teardown: tuple[str, ...] = ()
    """Shell code put into the job script verbatim, to run when the job ends, whatever its exit code
    (`$code`), which it does not change."""
    variables: types.Variables = Field(default_factory=dict)
    """Environment variables of all ranks, and of commands while they measure or verify the model. A
    profile is measured again if one changes that the job's Python files name, or that libraries
    read which compute (such as `OMP_...`). Variables in their values, and a `~` at the begin, are
    replaced as in paths, by the command that reads the spec; what is to follow from the job itself,
    such as `$PATH` after its modules, is a line of `setup`: `export PATH=/opt/bin:$PATH`. They may
    contain secrets: they are written only to two files of the run directory that nobody but its
    owner can read, to no script and no report. `PYTHONHASHSEED` is the same in all processes of a
    run, so that they iterate over sets of texts in one order: the number set here, else by the
    shell, else 0; `random` draws one for the run. A resumed run keeps its number."""
    container: Container | None = None
    """The container in which everything in the job runs except the launcher."""


class Slurm(types.Section):
    """Options for Slurm alone; ignored elsewhere."""

    partition: types.Text | None = None
    """Partition."""
    account: types.Text | None = None
    """Account the job is charged to."""
    options: types.Options = Field(default_factory=dict)
    """Further options of sbatch, such as `{qos: long, constraint: a100&nvlink, exclusive: true}`:
    long names or single letters, with a text, with `true` for an option without a value, or with a
    list for an option that is repeated. `gpus-per-node` and `mem` (or `mem-per-cpu`,
    `mem-per-gpu`) replace what follows from `resources`, and `comment` pipectl's own. `chdir`,
    `comment`, `cpus-per-task`, `gpus-per-node`, `mem`, `ntasks-per-node`, `open-mode`, `signal` and
    `time` may be `false`, for sites that refuse them. Options that other keys of the spec set are
    refused."""


class Pbs(types.Section):
    """Options for PBS alone; ignored elsewhere."""

    queue: types.Text | None = None
    """Queue."""
    account: types.Text | None = None
    """Account the job is charged to."""
    select: types.Select | None = None
    """Appended to the resources of each node in `-l select`, such as `model=icelake`. A text that
    begins with the number of nodes, such as `2:ncpus=64:mem=200gb`, is all of `-l select`. With
    `false`, for sites that refuse it, the job asks for totals: `-l ncpus=` and `-l mem=`."""
    options: types.Options = Field(default_factory=dict)
    """Further options of qsub by letter, such as `{P: project, m: ae, l: [place=scatter:excl]}`,
    with values as for `slurm`. Several nodes are placed by `scatter` unless `l` says otherwise.
    `S`, `j` and `k` may be `false`, for sites that refuse them."""
