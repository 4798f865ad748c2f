"""Ranks that train the jobs of several run directories, one after the other, as workers do."""

import sys
from pathlib import Path

from mpi4py import MPI

from pipectl.runs import RunDirectory
from pipectl.runtime.process import Doing, run_rank
from pipectl.runtime.worker import run

directories = sys.argv[1:]
for directory in directories[:-1]:
    run(RunDirectory(Path(directory)), MPI.COMM_WORLD, Doing())
sys.argv[1:] = ["--run", directories[-1]]
run_rank(run, __doc__)
