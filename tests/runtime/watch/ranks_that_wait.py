"""Ranks that pass a message round, watched like those that train, until one meets with something.

``--run DIRECTORY``; the environment says in ``TEST_HAPPENS`` what happens in step 3, and in
``TEST_RANK`` on which rank, if not on rank 1.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
from mpi4py import MPI

from pipectl.runs import RunDirectory
from pipectl.runtime.rank_process import run_rank
from pipectl.runtime.waiting import wait
from pipectl.runtime.watching import watched
from pipectl.watch.board import Board, wait_record
from pipectl.watch.rank import shared_files

STEPS, PAUSE_S = int(os.environ.get("TEST_STEPS", "6")), 0.05
HANG_AFTER_S = 3
RANK, STEP = int(os.environ.get("TEST_RANK", "1")), 3


def work(directory: RunDirectory, communicator: MPI.Intracomm, board: Board) -> None:
    spec = SimpleNamespace(launch=SimpleNamespace(hang_after=HANG_AFTER_S))
    plan = SimpleNamespace(prediction=None)
    with watched(communicator, directory, spec, plan, board):
        remember(directory, communicator.rank)
        for step in range(1, STEPS + 1):
            start = time.perf_counter()
            board.step(step)
            for micro_batch in range(2):
                pass_on(directory, communicator, board, step, micro_batch)
            board.pace(time.perf_counter() - start)
        board.phase("finishing")


def pass_on(
    directory: RunDirectory, world: MPI.Intracomm, board: Board, step: int, micro_batch: int
) -> None:
    rank, size = world.rank, world.size
    if rank:
        receive(world, board, rank - 1, micro_batch, directory)
    board.row("FORWARD", rank, micro_batch)
    time.sleep(PAUSE_S)
    if (rank, step, micro_batch) == (RANK, STEP, 1):
        happen(os.environ["TEST_HAPPENS"], directory)
    board.row("SEND_WAIT", rank, micro_batch)
    wait([world.Isend(np.zeros(1), (rank + 1) % size)])
    if not rank:
        receive(world, board, size - 1, micro_batch, directory)


def receive(
    world: MPI.Intracomm, board: Board, source: int, micro_batch: int, directory: RunDirectory
) -> None:
    board.row("RECEIVE_WAIT", world.rank, micro_batch)
    words = f"activation {micro_batch} of stage {source} from rank {source}"
    board.awaits(wait_record(words, source))
    message = world.Irecv(np.zeros(1), source)
    if os.environ["TEST_HAPPENS"] == "killed in a copy":
        while not message.Test():  # MPICH fails like this if the memory of the sender is gone
            if (directory.path / "happened").exists():
                raise MPI.Exception(MPI.ERR_OTHER)
    wait([message])


def happen(what: str, directory: RunDirectory) -> None:
    end_children()
    (directory.path / "happened").write_text(str(time.time()))
    events: dict[str, Any] = {
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "killed in a copy": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "frozen": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "asked": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "memory": take_memory,
        "crashes": lambda: ctypes.string_at(0),
        "exits": lambda: os._exit(3),
        "slow": lambda: time.sleep(2 * HANG_AFTER_S),
        "lingers": lambda: time.sleep(3600),
        "waits": lambda: wait_for(directory.path / "released"),
        "unwatched": lambda: kill_watcher(directory),
    }
    events[what]()


def end_children() -> None:
    """Children that end at once, in the midst of their work, by a crash: none is the rank's end."""
    fork = multiprocessing.get_context("fork").Process
    for pause_s in (0.0, 2 * PAUSE_S):
        child = fork(target=time.sleep, args=(60,))
        child.start()
        time.sleep(pause_s)
        child.terminate()
        child.join()
    child = fork(target=ctypes.string_at, args=(0,))
    child.start()
    child.join()


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(PAUSE_S)


def take_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
    bytearray(2**40)


def kill_watcher(directory: RunDirectory) -> None:
    """Of this node; rank 0 has started it, and no other process."""
    _, (watcher, _) = json.loads((directory.path / "pids-0").read_text())["family"]
    os.kill(watcher, signal.SIGKILL)


def remember(directory: RunDirectory, rank: int) -> None:
    me = psutil.Process()
    family = [me, *me.children()]
    found = {
        "family": [[process.pid, process.create_time()] for process in family],
        "shared": sorted(shared_files(me.pid)),
    }
    temporary = directory.path / f".pids-{rank}"
    temporary.write_text(json.dumps(found))
    temporary.rename(directory.path / f"pids-{rank}")


if __name__ == "__main__":
    run_rank(work, __doc__)
