"""Sections of the spec that say where and how the job runs. A site file may set these."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from pipectl.spec.section import Section
from pipectl.spec.values import (
    Binding,
    Bytes,
    Count,
    Directive,
    Flag,
    GpuAware,
    Launcher,
    Line,
    Natural,
    Positive,
    Progress,
    Scheduler,
    Script,
    Seconds,
    StopSignal,
    Variables,
)

_DIRECTIVES = "Further options for the head of the job script, verbatim."


class NodeKind(NamedTuple):
    """Nodes that are alike.

    Args:
        device: name of what its ranks compute with.
        speed: of a rank, relative to the first kind.
    """

    device: str
    nodes: int
    tasks_per_node: int
    memory_per_node: int | None
    speed: float

    @property
    def memory_of_task(self) -> int | None:
        """A rank's share of the node's memory in bytes; None where that is not given."""
        whole = self.memory_per_node
        return None if whole is None else whole // self.tasks_per_node


class SlurmNodes(Section):
    """How Slurm finds nodes of a further kind; they are asked for nothing that is not here."""

    partition: Line | None = Field(default=None, description="Partition.")
    constraint: Line | None = Field(default=None, description="Node features.")
    gres: Line | None = Field(default=None, description="Generic resources of each node.")
    nodelist: Line | None = Field(default=None, description="Nodes that must be among them.")
    exclude: Line | None = Field(default=None, description="Nodes that must not.")


class PbsNodes(Section):
    """How PBS finds nodes of a further kind."""

    select_extra: Line | None = Field(
        default=None, description="Appended to their chunk, such as `bigmem=True`."
    )


class MoreNodes(Section):
    """Nodes of a further kind; what each rank computes with is the same everywhere."""

    nodes: Count = Field(default=1, description="Nodes of this kind.")
    tasks_per_node: Count | None = Field(
        default=None, description="MPI ranks on each; by default as many as on the first nodes."
    )
    memory_per_node: Bytes | None = Field(
        default=None, description="Memory of each; by default the scheduler's own default."
    )
    speed: Positive = Field(
        default=1.0,
        description="Speed of a rank there, relative to the first nodes, on which the model is "
        "measured.",
    )
    slurm: SlurmNodes = Field(default_factory=SlurmNodes)
    pbs: PbsNodes = Field(default_factory=PbsNodes)


class Resources(Section):
    """What the job asks for, in words every scheduler is given its own way."""

    nodes: Count = Field(default=1, description="Nodes.")
    tasks_per_node: Count = Field(default=1, description="MPI ranks on each node.")
    cpus_per_task: Count = Field(
        default=1, description="Cores of each rank; so many threads, but for launch.progress_core."
    )
    gpus_per_node: Natural = Field(default=0, description="Accelerators of each node.")
    memory_per_node: Bytes | None = Field(
        default=None, description="Memory of each node; by default the scheduler's own default."
    )
    walltime: Seconds = Field(default=3600, description="Time after which the job is ended.")
    more: tuple[MoreNodes, ...] = Field(
        default=(),
        description="Nodes of further kinds, whose ranks are numbered behind the others: more "
        "memory for some stages, say.",
    )

    @property
    def ranks(self) -> int:
        """MPI ranks of the job."""
        return sum(kind.nodes * kind.tasks_per_node for kind in self.kinds)

    @property
    def kinds(self) -> tuple[NodeKind, ...]:
        """The nodes that are alike, in the order of their ranks."""
        tasks = self.tasks_per_node
        first = NodeKind("cpu", self.nodes, tasks, self.memory_per_node, 1.0)
        others = (
            NodeKind(
                f"cpu {number}",
                more.nodes,
                more.tasks_per_node or tasks,
                more.memory_per_node,
                more.speed,
            )
            for number, more in enumerate(self.more, start=2)
        )
        return (first, *others)

    @property
    def kind_of_node(self) -> tuple[NodeKind, ...]:
        """The kind of every node."""
        return tuple(kind for kind in self.kinds for _ in range(kind.nodes))


class Launch(Section):
    """How the ranks are started."""

    scheduler: Scheduler = Field(
        default="auto",
        description="`slurm`, `pbs`, or `local`, processes on this machine; `auto` is `slurm` "
        "where `sbatch` is found, else `pbs` where `qsub` is.",
    )
    launcher: Launcher = Field(
        default="auto", description="The command that starts the ranks; `auto` follows the MPI."
    )
    mpi: Line = Field(
        default="auto",
        description="What `srun` is given as `--mpi`, such as `pmix`; or whose `mpiexec` it is: "
        "`hydra` (MPICH), `openmpi`, `intel` or `cray` (PALS). `auto` is found out at submission, "
        "where that is possible.",
    )
    bind: Binding = Field(
        default="none",
        description="Whether each rank is tied to `cpus_per_task` cores of its own (`cores`), or "
        "to a memory domain of its node (`numa`).",
    )
    args: tuple[Line, ...] = Field(
        default=(), description="Further arguments of the launcher, verbatim."
    )
    progress: Progress = Field(
        default="auto",
        description="What moves messages while ranks compute: `none` where MPI does it by itself, "
        "`poll` between operators, or a `thread`; `auto` tries them out when the ranks start.",
    )
    progress_core: Flag = Field(
        default=False,
        description="Whether a rank computes with one thread less than it has cores, so that one "
        "is left for what moves messages; profiles are measured so, too.",
    )
    gpu_aware: GpuAware = Field(
        default="auto",
        description="Whether MPI is given an accelerator's memory: `always`, `never`, or `auto`, "
        "if MPI says that it can and a test message arrives.",
    )
    hang_after: Seconds = Field(
        default=30,
        description="How long a rank may be frozen, or its node silent, before all are ended; at "
        "least three steps.",
    )
    template: Line | None = Field(
        default=None,
        description="A script of yours around the job script, relative to the file that names it: "
        "its lines `#pipectl directives` and `#pipectl body` are replaced.",
    )
    check_messages: Flag = Field(
        default=False,
        description="Compare every message with what its sender says of it; slow, for debugging.",
    )


class Environment(Section):
    """What the job script prepares before the ranks start."""

    modules: tuple[Line, ...] = Field(
        default=(), description="Names for `module load`, in this order."
    )
    setup: tuple[Script, ...] = Field(
        default=(), description="Shell code put into the job script verbatim, behind the modules."
    )
    variables: Variables = Field(
        default_factory=dict, description="Environment variables of all ranks."
    )
    container: Line | None = Field(
        default=None,
        description="Image of Apptainer in which the ranks run, relative to the spec file, or an "
        "address such as `docker://...`; its `python3` has torch, mpi4py and pipectl.",
    )


class Checkpoint(Section):
    """When the training state is saved."""

    every: Count | None = Field(
        default=None, description="Steps between checkpoints; by default only after the last step."
    )
    keep: Count = Field(default=3, description="Checkpoints to keep; older ones are removed.")
    keep_every: Count | None = Field(
        default=None,
        description="Besides, checkpoints whose step is a multiple of this stay.",
    )
    on_signal: StopSignal = Field(
        default="USR2",
        description="Signal to the job script upon which the ranks save a checkpoint and end.",
    )
    lead_time: Seconds = Field(
        default=180,
        description="How long before the end of the walltime it is sent, at most a quarter of "
        "it; a step and the checkpoint must fit in.",
    )
    max_requeues: Natural = Field(
        default=3,
        description="How often the job goes back into the queue after that, or after the failure "
        "of a node, to go on from its last checkpoint. (On PBS it submits itself again, where jobs "
        "may.)",
    )


class Trace(Section):
    """Which steps are recorded action by action, for `pipectl trace`."""

    steps: tuple[Count, ...] = Field(
        default=(10,),
        description="Numbers of steps; one beyond the last step is the last. `[]` for none.",
    )
    every: Count | None = Field(
        default=None, description="Steps between further ones; 1 records all."
    )

    def includes(self, step: int, steps: int) -> bool:
        """Whether a step is recorded.

        Args:
            steps: of the whole run.
        """
        due = self.every is not None and step % self.every == 0
        return due or any(step == min(wanted, steps) for wanted in self.steps)


class Output(Section):
    """Where results go."""

    directory: Line = Field(
        default="runs",
        description="Directory of the run directories, relative to the directory of the command.",
    )


class Slurm(Section):
    """Options for Slurm alone; ignored elsewhere."""

    partition: Line | None = Field(default=None, description="Partition.")
    account: Line | None = Field(default=None, description="Account the job is charged to.")
    qos: Line | None = Field(default=None, description="Quality of service.")
    constraint: Line | None = Field(
        default=None, description="Node features, such as `a100&nvlink`."
    )
    reservation: Line | None = Field(default=None, description="Reservation.")
    gres: Line | None = Field(
        default=None, description="Generic resources of each node, beside accelerators."
    )
    licenses: Line | None = Field(default=None, description="Licences, such as `matlab:1`.")
    nodelist: Line | None = Field(default=None, description="Nodes that must be among the job's.")
    exclude: Line | None = Field(default=None, description="Nodes that must not.")
    mail_type: Line | None = Field(
        default=None, description="Upon what mail is sent, such as `END,FAIL`."
    )
    mail_user: Line | None = Field(default=None, description="To whom.")
    exclusive: Flag = Field(default=False, description="Share the nodes with no other job.")
    directives: tuple[Directive, ...] = Field(default=(), description=_DIRECTIVES)


class Pbs(Section):
    """Options for PBS alone; ignored elsewhere."""

    queue: Line | None = Field(default=None, description="Queue.")
    account: Line | None = Field(default=None, description="Account the job is charged to.")
    project: Line | None = Field(default=None, description="Project, where sites charge those.")
    place: Line | None = Field(
        default=None,
        description="Placement of the chunks, one a node, such as `scatter:excl`; by default "
        "`scatter` where there are several.",
    )
    select_extra: Line | None = Field(
        default=None, description="Appended to the resource selection, such as `model=icelake`."
    )
    mail: Line | None = Field(default=None, description="Upon what mail is sent, such as `ae`.")
    mail_user: Line | None = Field(default=None, description="To whom.")
    directives: tuple[Directive, ...] = Field(default=(), description=_DIRECTIVES)
