"""The command that starts one process per rank: MPI's mpiexec, or Slurm's srun."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from pipectl.batch.protocol import JobRequest
from pipectl.errors import SchedulerError


def mpiexec_command(request: JobRequest, places: Sequence[str] = ()) -> tuple[str, ...]:
    """The whole launch with mpiexec; inside an allocation it finds the nodes by itself.

    Args:
        places: options that name the nodes, where it would not find all.

    Raises:
        SchedulerError: there is no mpiexec.
    """
    return (
        find_mpiexec(request),
        "-n",
        str(request.ranks),
        *places,
        *_mpiexec_binding(request),
        *request.launch_args,
        *request.within(request.command),
    )


def srun_command(request: JobRequest) -> tuple[str, ...]:
    """The whole launch with srun.

    ``--cpus-per-task`` is repeated because Slurm 22.05 to 23.02 do not inherit it, and a rank
    that dies ends the step instead of leaving the others blocked.
    """
    return (
        "srun",
        "--kill-on-bad-exit=1",
        f"--mpi={'pmi2' if request.mpi == 'auto' else request.mpi}",
        *_tasks(request),
        f"--cpus-per-task={request.cpus_per_task}",
        "--distribution=block",
        "--export=ALL",
        *(("--cpu-bind=cores",) if request.bind == "cores" else ()),
        *request.launch_args,
        *request.within(request.command),
    )


def _tasks(request: JobRequest) -> tuple[str, ...]:
    """For srun; components of a job know theirs, which differ."""
    if request.more:
        return (f"--het-group=0-{len(request.more)}",)
    return (f"--ntasks={request.ranks}", f"--ntasks-per-node={request.tasks_per_node}")


def find_mpiexec(request: JobRequest) -> str:
    """mpiexec of the request, else the one beside its interpreter, else the first on PATH.

    With modules or set-up lines the PATH inside the job decides, which is not known here.

    Raises:
        SchedulerError: none of them exists.
    """
    if request.mpiexec is not None:
        return request.mpiexec
    embedded = Path(request.python).parent / "mpiexec"
    if embedded.exists():
        return str(embedded)
    if request.modules or request.setup:
        return "mpiexec"
    found = shutil.which("mpiexec")
    if found is None:
        raise SchedulerError(
            "mpiexec: not found beside the Python interpreter nor on PATH",
            cure="pip install 'pipectl[mpich]', or name your cluster's MPI in environment.modules",
        )
    return found


def _mpiexec_binding(request: JobRequest) -> tuple[str, ...]:
    if request.bind != "cores":
        return ()
    if request.mpi == "openmpi":
        return ("--map-by", f"slot:PE={request.cpus_per_task}", "--bind-to", "core")
    return ("-bind-to", f"core:{request.cpus_per_task}")
