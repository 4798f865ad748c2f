"""Whether as many processes were started as the plan has ranks. No torch is imported."""

from __future__ import annotations

from mpi4py import MPI

from pipectl.errors import MismatchError
from pipectl.plan import Plan


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
