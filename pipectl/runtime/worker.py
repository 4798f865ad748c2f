"""The process of one rank: ``python -m mpi4py -m pipectl.runtime.worker --run DIRECTORY``.

Under ``-m mpi4py`` an exception on one rank aborts all; before that, the rank writes what went
wrong, and where, to a file of its own in the run directory.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from mpi4py import MPI

from pipectl.capture import CapturedJob
from pipectl.errors import PipectlError
from pipectl.files import write_json
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.runtime.device import choose_device
from pipectl.runtime.engine import Doing
from pipectl.runtime.process import settle_process
from pipectl.runtime.setup import Setup, check_graph, check_world
from pipectl.runtime.telemetry import beat
from pipectl.runtime.trainer import Trainer
from pipectl.spec import load


def run(directory: RunDirectory, communicator: MPI.Comm, doing: Doing) -> None:
    """Train the job of a run directory on this rank.

    Raises:
        PipectlError: the files or the processes do not belong together, or user code fails.
    """
    doing.action = "reading the plan"
    spec, plan = load(directory.job), Plan.load(directory.plan)
    profile = Profile.load(directory.profile)
    check_world(communicator, plan)
    attempt = 1 + int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if communicator.rank == 0:
        beat(directory, "capturing", 0, spec.training.steps, attempt)
    settle_process(spec.resources.cpus_per_task)
    doing.action = "capturing the model"
    job = CapturedJob(spec)
    check_graph(communicator, job, plan, profile)
    local_rank = communicator.rank % spec.resources.tasks_per_node
    device = choose_device(spec.resources.gpus_per_node, local_rank)
    doing.action = "building the stages"
    setup = Setup(communicator, job, plan, device, doing)
    Trainer(setup, directory, attempt).train()


def report(directory: RunDirectory, rank: int, doing: Doing, error: BaseException) -> None:
    """Write what failed on this rank, and where, for ``pipectl status`` and into the log."""
    place = f"rank {rank}, stage {doing.stage}, step {doing.step}, {doing.action}"
    sys.stderr.write(f"pipectl: {place}: {type(error).__name__}: {error}\n")
    if not isinstance(error, PipectlError):
        traceback.print_exception(error)
    try:
        write_json(directory.error_of(rank), _document(rank, doing, error))
    except PipectlError as unwritten:
        sys.stderr.write(f"pipectl: {unwritten}\n")
    sys.stderr.flush()


def _document(rank: int, doing: Doing, error: BaseException) -> dict[str, Any]:
    known = error if isinstance(error, PipectlError) else None
    return {
        "version": 1,
        "rank": rank,
        "host": socket.gethostname(),
        "stage": doing.stage,
        "action": doing.action,
        "step": doing.step,
        "type": type(error).__name__,
        "message": known.message if known else str(error),
        "cure": known.cure if known else None,
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
        "exit_code": known.exit_code if known else 1,
    }


def main() -> None:
    """Entry point; exits through MPI's abort when this rank fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    directory = RunDirectory(parser.parse_args().run)
    communicator, doing = MPI.COMM_WORLD, Doing()
    try:
        run(directory, communicator, doing)
    except BaseException as error:
        report(directory, communicator.rank, doing, error)
        sys.exit(error.exit_code if isinstance(error, PipectlError) else 1)


if __name__ == "__main__":
    main()
