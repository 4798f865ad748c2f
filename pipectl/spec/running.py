"""Sections of the spec that say how and where the job runs. A site file may set these."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from pipectl.spec.types import (
    Bytes,
    Count,
    Directive,
    Flag,
    Natural,
    Positive,
    Script,
    Seconds,
    Section,
    Text,
    Variables,
    Walltime,
)


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
        """A rank's share of the node's memory in bytes; None if that is not given."""
        whole = self.memory_per_node
        return None if whole is None else whole // self.tasks_per_node


class SlurmNodes(Section):
    """How Slurm finds nodes of a further kind; they are asked for nothing that is not here."""

    partition: Text | None = None
    """Partition."""
    constraint: Text | None = None
    """Node features."""
    gres: Text | None = None
    """Generic resources of each node."""
    nodelist: Text | None = None
    """Nodes that must be among them."""
    exclude: Text | None = None
    """Nodes that must not."""


class PbsNodes(Section):
    """How PBS finds nodes of a further kind."""

    select_extra: Text | None = None
    """Appended to their chunk, such as `bigmem=True`."""


class MoreNodes(Section):
    """Nodes of a further kind; what each rank computes with is the same everywhere."""

    nodes: Count = 1
    """Nodes of this kind."""
    tasks_per_node: Count | None = None
    """MPI ranks on each; by default as many as on the first nodes."""
    memory_per_node: Bytes | None = None
    """Memory of each; by default the scheduler's own default."""
    speed: Positive = 1.0
    """Speed of a rank there, relative to the first nodes, on which the model is measured."""
    slurm: SlurmNodes = SlurmNodes()
    pbs: PbsNodes = PbsNodes()


class Resources(Section):
    """What the job asks for, in words that each scheduler is given in its own way."""

    nodes: Count = 1
    """Nodes."""
    tasks_per_node: Count = 1
    """MPI ranks on each node."""
    cpus_per_task: Count = 1
    """Cores of each rank; it computes with as many threads, but for `launch.progress_core`."""
    gpus_per_node: Natural = 0
    """Accelerators of each node. If above 0, ranks compute on them, and on the CPU if torch finds
    none (`pipectl doctor` says what it finds)."""
    memory_per_node: Bytes | None = None
    """Memory of each node; by default the scheduler's own default."""
    walltime: Walltime = 3600
    """Time after which the batch system ends the job; on this machine nothing does. A number
    without a unit is minutes, as for `sbatch --time`."""
    more: tuple[MoreNodes, ...] = ()
    """Nodes of further kinds, whose ranks are numbered after the others: more memory for some
    stages, say."""

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

    scheduler: Literal["auto", "local", "slurm", "pbs"] = "auto"
    """`slurm`, `pbs`, or `local`, processes on this machine; `auto` is `slurm` if `sbatch` is
    found, else `pbs` if `qsub` is."""
    launcher: Literal["auto", "srun", "mpiexec"] = "auto"
    """The command that starts the ranks; `auto` is `mpiexec`. `srun` needs Slurm."""
    mpi: Text = "auto"
    """What `srun` is given as `--mpi`, such as `pmix`; or whose `mpiexec` it is: `hydra` (MPICH),
    `openmpi`, `intel` or `cray` (PALS). `auto` is found out at submission, if that is possible."""
    bind: Literal["none", "cores", "numa"] = "none"
    """Whether each rank is tied to `cpus_per_task` cores of its own (`cores`), or to a memory
    domain of its node (`numa`)."""
    args: tuple[Text, ...] = ()
    """Further arguments of the launcher, verbatim."""
    progress: Literal["auto", "none", "poll", "thread"] = "auto"
    """What moves messages while ranks compute: `none` if MPI does it by itself, `poll` between
    operators, or a `thread`; `auto` follows from the nodes, the size of the messages and what
    `pipectl profile --links` measured."""
    progress_core: Flag = False
    """Whether a rank computes with one thread less than it has cores, so that one is left for what
    moves messages; profiles are measured so, too."""
    gpu_aware: Literal["auto", "always", "never"] = "auto"
    """Whether MPI is given an accelerator's memory: `always`, `never`, or `auto`, if MPI says that
    it can and a test message arrives."""
    hang_after: Seconds = 30
    """How long a rank may be frozen, or its node silent, before all are ended; at least three
    steps."""
    template: Text | None = None
    """A Jinja template of yours that extends the job script, relative to the file that names it."""
    check_messages: Flag = False
    """Compare every message with what its sender says of it; slow, for debugging."""


class Environment(Section):
    """What the job script prepares before the ranks start."""

    modules: tuple[Text, ...] = ()
    """Names for `module load`, in this order."""
    setup: tuple[Script, ...] = ()
    """Shell code put into the job script verbatim, after the modules."""
    variables: Variables = Field(default_factory=dict)
    """Environment variables of all ranks. They may be keys and tokens: they are in no script and no
    report, but in a file that only its owner can read."""
    container: Text | None = None
    """Image of Apptainer in which the ranks run, relative to the spec file, or an address such as
    `docker://...`; its `python3` has torch, mpi4py and pipectl."""


class Checkpoint(Section):
    """When the training state is saved."""

    every: Count | None = None
    """Steps between checkpoints; by default only after the last step."""
    keep: Count = 3
    """Checkpoints to keep; older ones are removed."""
    keep_every: Count | None = None
    """Checkpoints whose step is a multiple of this stay as well."""
    on_signal: Literal["USR2", "USR1"] = "USR2"
    """Signal to the job script upon which the ranks save a checkpoint and end."""
    lead_time: Seconds = 180
    """How long before the end of the walltime it is sent, at most a quarter of it; a step and the
    checkpoint must fit in."""
    max_requeues: Natural = 3
    """How often the job goes back into the queue after that, or after the failure of a node, to go
    on from its last checkpoint. (On PBS it submits itself again, where jobs may.)"""


class Trace(Section):
    """Which steps are recorded action by action, for `pipectl report`."""

    steps: tuple[Count, ...] = (10,)
    """Numbers of steps; one beyond the last step is the last. `[]` for none."""
    every: Count | None = None
    """Steps between further ones; 1 records all."""

    def includes(self, step: int, steps: int) -> bool:
        """Whether a step is recorded.

        Args:
            steps: of the whole run.
        """
        due = self.every is not None and step % self.every == 0
        return due or any(step == min(wanted, steps) for wanted in self.steps)


class Output(Section):
    """Where results go."""

    directory: Text = "runs"
    """Directory of the run directories, relative to the directory of the command; `PIPECTL_RUNS`
    in the environment is another default. Commands on runs look there, or where `-d` says."""


class Slurm(Section):
    """Options for Slurm alone; ignored elsewhere."""

    partition: Text | None = None
    """Partition."""
    account: Text | None = None
    """Account the job is charged to."""
    qos: Text | None = None
    """Quality of service."""
    constraint: Text | None = None
    """Node features, such as `a100&nvlink`."""
    reservation: Text | None = None
    """Reservation."""
    gres: Text | None = None
    """Generic resources of each node, besides accelerators."""
    licenses: Text | None = None
    """Licences, such as `matlab:1`."""
    nodelist: Text | None = None
    """Nodes that must be among the job's."""
    exclude: Text | None = None
    """Nodes that must not."""
    mail_type: Text | None = None
    """Events upon which mail is sent, such as `END,FAIL`."""
    mail_user: Text | None = None
    """Who receives the mail."""
    exclusive: Flag = False
    """Share the nodes with no other job."""
    omit: tuple[Literal["cpus-per-task", "gpus-per-node", "time"], ...] = ()
    """Options that are not written, since the site refuses them: `cpus-per-task`, `gpus-per-node`
    or `time`."""
    directives: tuple[Directive, ...] = ()
    """Further options for the head of the job script, verbatim; other keys overrule them."""


class Pbs(Section):
    """Options for PBS alone; ignored elsewhere."""

    queue: Text | None = None
    """Queue."""
    account: Text | None = None
    """Account the job is charged to."""
    project: Text | None = None
    """Project, at sites that charge those."""
    place: Text | None = None
    """Placement of the chunks, one per node, such as `scatter:excl`; by default `scatter` if there
    are several."""
    select_extra: Text | None = None
    """Appended to the resource selection, such as `model=icelake`."""
    mail: Text | None = None
    """Events upon which mail is sent, such as `ae`."""
    mail_user: Text | None = None
    """Who receives the mail."""
    directives: tuple[Directive, ...] = ()
    """Further options for the head of the job script, verbatim; other keys overrule them."""
