"""The nodes of a job, and checks of them and of the plan before torch is imported."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from pipectl.errors import MismatchError
from pipectl.plan import Plan, Replication

if TYPE_CHECKING:
    from mpi4py import MPI

_Node = TypeVar("_Node")


def node_name() -> str:
    """The batch system's name of this node: several of its nodes may share one host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def grouped(nodes: Iterable[_Node]) -> dict[_Node, list[int]]:
    """The ranks of every node, nodes by their first rank.

    Args:
        nodes: of every rank.
    """
    ranks_of: dict[_Node, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    return ranks_of


def check_world(communicator: MPI.Comm, plan: Plan) -> None:
    """Compare the processes that were started with the plan.

    Raises:
        MismatchError: the number of processes differs; if MPI started several single processes, the
            launcher and the MPI library usually do not match.
    """
    if communicator.size == plan.ranks:
        return
    cure = "plan again for the ranks you start, or start as many as the plan has"
    if communicator.size == 1:
        cure = (
            "every process is alone: the launcher and mpi4py use different MPIs; "
            "set launch.mpi (srun --mpi=...), or use the mpiexec that belongs to mpi4py's MPI"
        )
    raise MismatchError(
        f"MPI started {communicator.size} process(es), but the plan has {plan.ranks} ranks",
        cure=cure,
    )


def check_supported(plan: Plan, file: str = "plan.json") -> None:
    """Refuse a plan before anything is built for it.

    Raises:
        MismatchError: naming the file and what it asks for.
    """
    for feature in unsupported(plan):
        raise MismatchError(
            f"{file}: the plan has {feature}; it can be simulated, but not run",
            cure="set pipeline.backward to together, and plan the job again",
        )
    if plan.replication is Replication.WHOLE:
        return
    for index, stage in enumerate(plan.stages):
        if stage.replicas > plan.micro_batch_size:
            raise MismatchError(
                f"{file}: stages[{index}] has {stage.replicas} replicas for the "
                f"{plan.micro_batch_size} samples of a micro-batch",
                cure="use larger micro-batches, or fewer replicas",
            )


def unsupported(plan: Plan) -> list[str]:
    """The features of the plan that cannot be run, in words; empty if there are none."""
    from pipectl.schedule.combinations import clashes_of_plan  # loads all schedules

    return [clash.pair(plan.schedule) for clash in clashes_of_plan(plan)]
