"""The processes that were started: how many there are, and on which nodes. No torch is imported."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from pipectl.errors import MismatchError

if TYPE_CHECKING:
    from mpi4py import MPI

    from pipectl.plan import Plan

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
        MismatchError: another number of processes; several single ones are the usual sign of a
            launcher and an MPI library that do not belong together.
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
