"""The command that starts one process per rank: MPI's mpiexec, or Slurm's srun."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from pipectl.batch import process
from pipectl.batch.dialects import AUTO, Layout, launch_words, recognized
from pipectl.batch.protocol import JobRequest
from pipectl.errors import SchedulerError

_PATIENCE_S = 20.0
_SRUN_BINDING = {"none": (), "cores": ("--cpu-bind=cores",), "numa": ("--cpu-bind=ldoms",)}


def mpiexec_command(
    request: JobRequest, places: Sequence[str] = (), *, here: bool = False
) -> tuple[str, ...]:
    """The whole launch with mpiexec; inside an allocation it finds the nodes by itself.

    Args:
        places: options of MPICH's that name the nodes, where it would not find all.
        here: whether all ranks are started on this machine, whatever nodes the job asks for.

    Raises:
        InvalidInputError: ranks cannot be bound as the job wants it.
        SchedulerError: there is no mpiexec, or not one that can be told the nodes.
    """
    if places and request.mpi not in {AUTO, "hydra"}:
        raise SchedulerError(
            f"resources.more: the mpiexec of {request.mpi} cannot be given such nodes here",
            cure="set launch.launcher: srun",
        )
    per_node = None if here or request.more else request.tasks_per_node
    layout = Layout(request.ranks, per_node, request.cpus_per_task, request.bind)
    return (
        find_mpiexec(request),
        *launch_words(request.mpi, layout),
        *places,
        *request.launch_args,
        *request.within(request.command),
    )


def refuse_srun(request: JobRequest, jobs: str) -> None:
    """Raise where a job without Slurm is to be started by its srun.

    Args:
        jobs: what kind of jobs they are, in words.

    Raises:
        SchedulerError: it is.
    """
    if request.launcher == "srun" and not request.alone:
        raise SchedulerError(
            "launch.launcher: srun needs Slurm", cure=f"use mpiexec or auto for {jobs}"
        )


def srun_command(request: JobRequest) -> tuple[str, ...]:
    """The whole launch with srun.

    ``--cpus-per-task`` is repeated because Slurm 22.05 to 23.02 do not inherit it, and a rank
    that dies ends the step instead of leaving the others blocked.
    """
    written = "cpus-per-task" not in request.slurm.omit
    return (
        "srun",
        "--kill-on-bad-exit=1",
        f"--mpi={'pmi2' if request.mpi == 'auto' else request.mpi}",
        *_tasks(request),
        *((f"--cpus-per-task={request.cpus_per_task}",) if written else ()),
        "--distribution=block",
        "--export=ALL",
        *_SRUN_BINDING[request.bind],
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
            cure="pip install mpich, or name your cluster's MPI in environment.modules",
        )
    return found


def dialect_of(mpiexec: str) -> str | None:
    """Which words an mpiexec understands, as it says itself; None where that is not known."""
    try:
        done = process.run([mpiexec, "--version"], cure="", timeout_s=_PATIENCE_S)
    except SchedulerError:
        return None
    return recognized(f"{done.stdout}\n{done.stderr}")
