"""Ranks that train some runs, and then others from the checkpoints of these.

Arguments: ``DIRECTORY`` to train in, or ``FROM:STEP:DIRECTORY`` to go on from another's checkpoint.
"""

import os
import shutil
import sys
from pathlib import Path

from mpi4py import MPI

from pipectl.runs import ATTEMPT, RunDirectory
from pipectl.runtime.process import Doing
from pipectl.runtime.waiting import barrier
from pipectl.runtime.worker import run

for argument in sys.argv[1:]:
    *given, directory = argument.split(":")
    target = RunDirectory(Path(directory))
    os.environ[ATTEMPT] = "2" if given else "1"
    if given and MPI.COMM_WORLD.rank == 0:
        name = f"step-{int(given[1]):06d}"
        shutil.copytree(Path(given[0]) / "checkpoints" / name, target.checkpoints / name)
    barrier(MPI.COMM_WORLD)
    run(target, MPI.COMM_WORLD, Doing())
