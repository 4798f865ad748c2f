"""Ranks that print into each other's lines, and one that dies: ``labelled_ranks.py HOW``."""

import os
import signal
import sys
import time

from mpi4py import MPI

from pipectl.runtime.labelling import labelled

HOW, WORLD = sys.argv[1], MPI.COMM_WORLD
with labelled(str(WORLD.rank)):
    for _ in range(200):
        sys.stdout.write("piece ")
        sys.stdout.flush()
        os.write(2, b"and end\n")
    WORLD.Barrier()
    if WORLD.rank == 1 and HOW == "killed":
        sys.stdout.write("last words")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if WORLD.rank == 1 and HOW == "aborts":
        print("last words")
        WORLD.Abort(5)
    while HOW != "ends":
        time.sleep(60)
print("without a label")
