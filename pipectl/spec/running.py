"""Sections of the spec that say how and where the job runs. A site file may set these."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipectl.spec.types import (
    Bytes,
    Count,
    Former,
    Natural,
    Options,
    Script,
    Seconds,
    Section,
    Select,
    Text,
    Variables,
    Walltime,
)


class Resources(Section):
    """What the job asks for, in words that each scheduler is given in its own way."""

    nodes: Count = 1
    """Nodes."""
    tasks_per_node: Count = 1
    """MPI ranks on each node."""
    cpus_per_task: Count = 1
    """Cores of each rank; it computes with as many threads, unless `launch.progress` is
    `core`."""
    gpus_per_node: Natural = 0
    """Accelerators of each node. If above 0, ranks compute on them, and on the CPU if torch finds
    none (`pipectl doctor` says what it finds)."""
    memory_per_node: Bytes | None = None
    """Memory of each node; by default the scheduler's own default."""
    walltime: Walltime = 3600
    """Time after which the batch system ends the job; on this machine nothing does. A number
    without a unit is minutes, as for `sbatch --time`."""

    former_keys: ClassVar = {
        "more": Former("a job has nodes of one kind; ask for what the largest stage needs")
    }

    @property
    def ranks(self) -> int:
        """MPI ranks of the job."""
        return self.nodes * self.tasks_per_node

    @property
    def memory_per_task(self) -> int | None:
        """A rank's share of the node's memory in bytes; None if that is not given."""
        whole = self.memory_per_node
        return None if whole is None else whole // self.tasks_per_node


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
    progress: Literal["auto", "none", "poll", "thread", "core"] = "auto"
    """What moves messages while ranks compute: `none` if MPI does it by itself, `poll` between
    operators, or a `thread`; `auto` follows from the nodes, the size of the messages and what
    `pipectl profile --links` measured. With `core`, ranks compute with one thread less than they
    have cores, and leave that core to a thread for large messages; profiles are measured so too."""
    gpu_aware: Literal["auto", "always", "never"] = "auto"
    """Whether MPI is given an accelerator's memory: `always`, `never`, or `auto`, if MPI says that
    it can and a test message arrives."""
    hang_after: Seconds = 30
    """How long a rank may be frozen, or its node silent, before all are ended; at least three
    steps."""
    template: Text | None = None
    """A Jinja template of yours that extends the job script, relative to the file that names it."""

    former_keys: ClassVar = {
        "progress_core": Former("write launch.progress: core"),
        "check_messages": Former("write environment.variables: {PIPECTL_CHECK_MESSAGES: 1}"),
    }

    @property
    def spare_cores(self) -> int:
        """Cores of each rank that do not compute."""
        return int(self.progress == "core")


class Environment(Section):
    """What the job script prepares before the ranks start."""

    modules: tuple[Text, ...] = ()
    """Names for `module load`, in this order."""
    setup: tuple[Script, ...] = ()
    """Shell code put into the job script verbatim, after the modules."""
    variables: Variables = Field(default_factory=dict)
    """Environment variables of all ranks. They may be keys and tokens: they are in no script and no
    report, but in two files of the run that only its owner can read."""
    container: Text | None = None
    """Image of Apptainer in which the ranks run, relative to the spec file, or an address such as
    `docker://...`; its `python3` has torch, mpi4py and pipectl."""


class Checkpoint(Section):
    """When the training state is saved."""

    former_keys: ClassVar = {"on_signal": Former("remove it", ("USR1", "USR2"))}

    every: Count | None = None
    """Steps between checkpoints; by default only after the last step."""
    keep: Count = 3
    """Checkpoints to keep; older ones are removed."""
    keep_every: Count | None = None
    """Checkpoints whose step is a multiple of this stay as well."""
    lead_time: Seconds = 180
    """How long before the end of the walltime the ranks save a checkpoint and end, at most a
    quarter of it; a step and the checkpoint must fit in."""
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


def _moved(*names: str) -> dict[str, Former]:
    return {
        name: Former(f"write slurm.options: {{{name.replace('_', '-')}: ...}}") for name in names
    }


class Slurm(Section):
    """Options for Slurm alone; ignored elsewhere."""

    former_keys: ClassVar = {
        **_moved("qos", "constraint", "reservation", "gres", "licenses", "nodelist", "exclude"),
        **_moved("mail_type", "mail_user"),
        "exclusive": Former("write slurm.options: {exclusive: ...}; true if it has no value"),
        "omit": Former(
            "write slurm.options: {time: false}, say, for one that is not to be written"
        ),
        "directives": Former("write slurm.options: {gres: gpu:1}, say, for --gres=gpu:1"),
    }

    partition: Text | None = None
    """Partition."""
    account: Text | None = None
    """Account the job is charged to."""
    options: Options = Field(default_factory=dict)
    """Further options of sbatch, such as `{qos: long, constraint: a100&nvlink, exclusive: true}`:
    long names, or single letters, with a text, with `true` for an option without a value, or with a
    list for one that is given several times. `gpus-per-node` and `mem` (or `mem-per-cpu`,
    `mem-per-gpu`) replace what follows from `resources`; `cpus-per-task`, `gpus-per-node`, `mem`
    and `time` may be `false`: they are not written, since the site refuses them. What other keys of
    the spec say is refused."""


class Pbs(Section):
    """Options for PBS alone; ignored elsewhere."""

    former_keys: ClassVar = {
        "project": Former("write pbs.options: {P: ...}"),
        "place": Former("write pbs.options: {l: [place=...]}"),
        "select_extra": Former("write pbs.select: ..."),
        "mail": Former("write pbs.options: {m: ...}"),
        "mail_user": Former("write pbs.options: {M: ...}"),
        "directives": Former("write pbs.options: {p: 5}, say, for -p 5"),
    }

    queue: Text | None = None
    """Queue."""
    account: Text | None = None
    """Account the job is charged to."""
    select: Select | None = None
    """Appended to the resources of each node, such as `model=icelake`."""
    options: Options = Field(default_factory=dict)
    """Further options of qsub by letter, such as `{P: project, m: ae, l: [place=scatter:excl]}`,
    written as those of `slurm`. Nodes are placed by `scatter` if there are several."""
