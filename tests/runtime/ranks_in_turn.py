"""Ranks that train the jobs of several run directories, one after the other, as workers do.

Arguments: ``DIRECTORY``, or ``FROM:STEP:DIRECTORY`` to go on from another run's checkpoint.
"""

import shutil
import sys
from pathlib import Path

from mpi4py import MPI

from pipectl.runs import RunDirectory
from pipectl.runtime.process import run_rank
from pipectl.runtime.waiting import barrier
from pipectl.runtime.worker import run

for argument in sys.argv[1:]:
    *start, directory = argument.split(":")
    if start:
        name = f"step-{int(start[1]):06d}"
        if MPI.COMM_WORLD.rank == 0:
            run_directory = RunDirectory(Path(directory))
            run_directory.start_of(2).errors.mkdir(parents=True)
            checkpoints = run_directory.checkpoints
            shutil.copytree(Path(start[0]) / "checkpoints" / name, checkpoints / name)
        barrier(MPI.COMM_WORLD)
    sys.argv[1:] = ["--run", directory]
    run_rank(run, __doc__)
