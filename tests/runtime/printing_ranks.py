"""Ranks that print, and may not be kept from working by it: ``printing_ranks.py HOW``."""

import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from mpi4py import MPI

from pipectl.runtime import rank_process

HOW, WORLD = sys.argv[1], MPI.COMM_WORLD
RUN = Path(os.environ["PIPECTL_RUN_DIRECTORY"])
if HOW == "shares":
    rank_process.MAX_FILES = 1
with rank_process.own_log(WORLD.rank, WORLD.size):
    rank_process.say(f"rank {WORLD.rank} \x1b[2Jbegins")
    if HOW == "replaced":  # as code that writes a copy of all that is printed
        sys.stdout, sys.stderr = SimpleNamespace(write=sys.stdout.write), None
        rank_process.say(f"rank {WORLD.rank} goes on")
        sys.stderr = sys.stdout
        sys.stdout.flush = lambda: None
    if HOW == "full":  # as a full disk: no file may grow any more
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    for turn in range(200):
        sys.stdout.write("piece ")
        sys.stdout.flush()
        print("and", "end", file=sys.stdout if HOW == "shares" else sys.stderr)
        if HOW == "cut" and turn == 99:
            os.truncate(RUN / f"logs/rank-{WORLD.rank:04d}.log", 0)
    WORLD.Barrier()
    if WORLD.rank == 1 and HOW == "killed":
        sys.stdout.write("last words")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if WORLD.rank == 1 and HOW == "aborts":
        print("last words")
        WORLD.Abort(5)
    while HOW in ("killed", "aborts"):
        time.sleep(60)
    os.system("echo from a child")
    if HOW == "shares":
        sys.stdout.write("no end")
sys.stdout.write("to the launcher\n")  # in one piece, since ranks share that stream
sys.stdout.flush()  # before MPI ends, after which launchers may lose it
