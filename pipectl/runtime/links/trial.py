"""The program of `pipectl doctor --submit`: what works between two ranks of a job.

``mpiexec -n 2 python -m mpi4py -m pipectl.runtime.links.trial --run DIRECTORY --ranks 2 --gpus 0``
writes ``trial.json`` into the run directory: a list of findings.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpi4py import MPI

from pipectl.batch.findings import Finding, assess
from pipectl.errors import PipectlError
from pipectl.files import write_json, write_text
from pipectl.runs import Heartbeat, RunDirectory, start_of_job
from pipectl.runtime.links.measure import LEVELS, REACH_S, REACH_SIZES, ping_pong
from pipectl.runtime.nodes import node_name
from pipectl.runtime.rank_process import begin, finish, report
from pipectl.units import format_bytes, format_time, plural

_PATIENCE_S, _PAUSE_S = 10.0, 0.1
"""Time in which a file that one node has written must be there on the others."""
_ALONE = (
    "set launch.mpi to the kind that the MPI needs (srun --mpi=list), or use the mpiexec that "
    "belongs to the MPI that mpi4py loads"
)


def examine(directory: RunDirectory, ranks: int, gpus: int) -> Iterator[Finding]:
    """Try MPI, the network, accelerators and the files. Collective.

    Args:
        ranks: that were to be started.
        gpus: accelerators that the job has on each node.
    """
    world = MPI.COMM_WORLD
    library = " ".join(MPI.Get_library_version().replace("\0", "").splitlines()[0].split())
    if world.size != ranks:
        text = f"{ranks} ranks were started, but each sees {world.size} ({library})"
        yield Finding("mpi", "fail", text, _ALONE)
        return
    level = LEVELS.get(MPI.Query_thread(), "unknown")
    yield assess("mpi", f"{library}, MPI_THREAD_{level.upper()}")
    yield _try_network(world)
    if gpus:
        yield _try_gpus(world)
    yield _try_files(directory, world)


def _try_network(world: MPI.Intracomm) -> Finding:
    """Send messages between the first two ranks."""
    nodes = world.allgather(node_name())
    (_, latency_s), (size, time_s) = ping_pong(world, REACH_S, REACH_SIZES)
    speed = f"{format_time(latency_s)}, {format_bytes(int(size / time_s))}/s"
    if nodes[0] == nodes[1]:
        return assess("network", f"not tried: both ranks are on {nodes[0]}; there {speed}")
    return assess("network", f"{nodes[0]} to {nodes[1]}: {speed}")


def _try_gpus(world: MPI.Intracomm) -> Finding:
    """Compute on an accelerator in each rank."""
    import torch

    from pipectl.torch_api import current_accelerator

    found = 0
    try:
        if (device := current_accelerator()) is not None:
            found = torch.accelerator.device_count()
            fault = "" if torch.ones(8, device=device).sum().item() == 8 else "computes wrongly"
        else:
            fault = f"torch {torch.__version__} finds no accelerator"
    except RuntimeError as error:  # of a driver, say
        fault = str(error).splitlines()[0]
    for node, its in world.allgather((node_name(), fault)):
        if its:
            hint = "see that the job asks for GPUs, and that its torch is built for them"
            return Finding("gpu", "fail", f"{node}: {its}", hint)
    return assess("gpu", f"{plural(found, 'accelerator')} for each rank, which compute")


def _try_files(directory: RunDirectory, world: MPI.Intracomm) -> Finding:
    """Let the last rank write a file that the first one reads."""
    file, text = directory.path / "trial.txt", str(world.bcast(os.getpid()))
    nodes, fault = world.allgather(node_name()), ""
    if world.rank == world.size - 1:
        try:
            write_text(file, text)
        except (OSError, PipectlError) as error:
            fault = str(error)
    fault = world.bcast(fault, root=world.size - 1)
    start = time.monotonic()
    seen, waited_s = False, 0.0
    while world.rank == 0 and not fault and not seen and waited_s < _PATIENCE_S:
        seen = file.exists() and file.read_text(encoding="utf-8") == text
        waited_s = time.monotonic() - start
        if not seen:
            time.sleep(_PAUSE_S)
    if not fault and not world.bcast(seen):
        fault = f"{nodes[0]} does not see within {_PATIENCE_S:.0f} s what {nodes[-1]} writes"
    if fault:
        hint = "put output.directory on a file system that all nodes share"
        return Finding("shared files", "fail", f"{directory.path}: {fault}", hint)
    return assess("shared files", f"{nodes[0]} reads what {nodes[-1]} writes to {directory.path}")


def main(arguments: Sequence[str]) -> None:
    """Entry point; exits through MPI's abort if this rank fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=lambda path: RunDirectory(Path(path)), required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    values = parser.parse_args(arguments)
    run: RunDirectory = values.run
    rank = MPI.COMM_WORLD.rank
    begin(run, rank)
    try:
        findings = [each._asdict() for each in examine(run, values.ranks, values.gpus)]
        if rank == 0:
            write_json(run.path / "trial.json", {"findings": findings})
            Heartbeat("tried", 100, 100).save(start_of_job(run).heartbeat)
        finish(run, MPI.COMM_WORLD)
    except BaseException as error:
        report(run, rank, error, action="trying what works")
        sys.exit(error.exit_code if isinstance(error, PipectlError) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
