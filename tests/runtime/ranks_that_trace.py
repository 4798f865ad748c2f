"""The worker of a training, on machines whose clocks started at different times.

Arguments: the run directory. Rank 1 seems to be another machine, 1,000 s ahead.
"""

import sys
import time
from pathlib import Path

from mpi4py import MPI

AHEAD_S = 1000.0
rank, real = MPI.COMM_WORLD.rank, time.perf_counter
time.perf_counter = lambda: real() + AHEAD_S * rank  # before anybody takes a reference

from pipectl.runs import RunDirectory  # noqa: E402
from pipectl.runtime import clock, worker  # noqa: E402
from pipectl.runtime.process import Doing  # noqa: E402

clock._machine = lambda: rank
worker.run(RunDirectory(Path(sys.argv[1])), MPI.COMM_WORLD, Doing())
