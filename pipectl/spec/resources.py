"""Sections of the spec that say what is asked of the batch system. A site file may set these."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from pipectl.spec.section import Section
from pipectl.spec.values import (
    Bytes,
    Count,
    Directive,
    Flag,
    Line,
    Natural,
    Omitted,
    Positive,
    Walltime,
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
    gpus_per_node: Natural = Field(
        default=0,
        description="Accelerators of each node. If above 0, ranks compute on them, and on the CPU "
        "where torch finds none (`pipectl doctor` says what it finds).",
    )
    memory_per_node: Bytes | None = Field(
        default=None, description="Memory of each node; by default the scheduler's own default."
    )
    walltime: Walltime = Field(
        default=3600,
        description="Time after which the batch system ends the job; on this machine nothing does. "
        "A number without a unit is minutes, as for `sbatch --time`.",
    )
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
    omit: tuple[Omitted, ...] = Field(
        default=(),
        description="Options that are not written, since the site refuses them: "
        "`cpus-per-task`, `gpus-per-node` or `time`.",
    )
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
