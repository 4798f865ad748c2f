"""The nodes of a job, and checks of them and of the plan; it imports neither torch nor MPI."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from math import ceil
from typing import TYPE_CHECKING, TypeVar

from pipectl.errors import MismatchError
from pipectl.plan import Plan, Replication

if TYPE_CHECKING:
    from mpi4py import MPI

    from pipectl.schedule.combinations import Clash
    from pipectl.spec import JobSpec

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
    hint = "plan again for the ranks you start, or start as many as the plan has"
    if communicator.size == 1:
        hint = (
            "every process is alone: the launcher and mpi4py use different MPIs; "
            "set launch.mpi (srun --mpi=...), or use the mpiexec that belongs to mpi4py's MPI"
        )
    raise MismatchError(
        f"MPI started {communicator.size} process(es), but the plan has {plan.ranks} ranks",
        hint=hint,
    )


def check_supported(plan: Plan, file: str = "plan.json", spec: JobSpec | None = None) -> None:
    """Refuse a plan before anything is built for it.

    Args:
        spec: of the job that is to run it.

    Raises:
        MismatchError: naming the file and what it asks for.
    """
    for clash in _clashes(plan):
        raise MismatchError(
            f"{file}: the plan has {clash.pair(plan.schedule)}; it can be simulated, but not run",
            hint=f"{clash.hint()}; and plan the job again",
        )
    if spec is not None:
        _check_reproducible(plan, spec, file)
    if plan.replication is Replication.WHOLE:
        return
    for index, stage in enumerate(plan.stages):
        if stage.replicas > plan.micro_batch_size:
            raise MismatchError(
                f"{file}: stages[{index}] has {stage.replicas} replicas for the "
                f"{plan.micro_batch_size} samples of a micro-batch",
                hint="use larger micro-batches, or fewer replicas",
            )


def _check_reproducible(plan: Plan, spec: JobSpec, file: str) -> None:
    """Refuse a plan under which results would depend on replicas, although they must not."""
    if plan.reproducible != spec.training.reproducible:
        wrong = "with" if plan.reproducible else "without"
        raise MismatchError(
            f"{file} was made {wrong} training.reproducible", hint="plan the job again"
        )
    if not plan.reproducible:
        return
    if plan.replication is Replication.SPLIT and any(s.replicas > 1 for s in plan.stages):
        raise MismatchError(
            f"{file}: replication is split, but training.reproducible needs micro-batches that no "
            "replicas share: rounding depends on the samples that are computed together",
            hint="plan the job again, or set training.reproducible: false",
        )
    count, batch_size = spec.pipeline.micro_batches, spec.training.batch_size
    if count is not None and plan.micro_batch_size != ceil(batch_size / count):
        raise MismatchError(
            f"{file} has micro-batches of {plan.micro_batch_size} samples, but "
            f"pipeline.micro_batches: {count} of training.batch_size: {batch_size} are of "
            f"{ceil(batch_size / count)}, and training.reproducible needs the same for any ranks",
            hint="plan the job again",
        )


def unsupported(plan: Plan) -> list[str]:
    """The features of the plan that cannot be run, in words; empty if there are none."""
    return [clash.pair(plan.schedule) for clash in _clashes(plan)]


def _clashes(plan: Plan) -> Iterable[Clash]:
    from pipectl.schedule.combinations import clashes_of_plan  # loads all schedules

    return clashes_of_plan(plan)
