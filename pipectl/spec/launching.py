"""Sections of the spec that say how the job runs. A site file may set these."""

from __future__ import annotations

from pydantic import Field

from pipectl.spec.section import Section
from pipectl.spec.values import (
    Binding,
    Count,
    Flag,
    GpuAware,
    Launcher,
    Line,
    Natural,
    Progress,
    Scheduler,
    Script,
    Seconds,
    StopSignal,
    Variables,
)


class Launch(Section):
    """How the ranks are started."""

    scheduler: Scheduler = Field(
        default="auto",
        description="`slurm`, `pbs`, or `local`, processes on this machine; `auto` is `slurm` "
        "where `sbatch` is found, else `pbs` where `qsub` is.",
    )
    launcher: Launcher = Field(
        default="auto",
        description="The command that starts the ranks; `auto` is `mpiexec`. `srun` needs Slurm.",
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
        "`poll` between operators, or a `thread`; `auto` follows from the nodes, the size of the "
        "messages and what `pipectl profile --links` measured.",
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
        default_factory=dict,
        description="Environment variables of all ranks. They may be keys and tokens: they are in "
        "no script and no report, but in a file that only its owner can read.",
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
        description="Directory of the run directories, relative to the directory of the command. "
        "Commands on runs look in `runs`, or where `-d` says.",
    )
