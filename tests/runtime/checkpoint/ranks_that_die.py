"""Ranks that train until one kills itself, or all, before a chosen operation on files.

``--run DIRECTORY`` trains, and ``--save DIRECTORY KEEP STEP...`` writes some checkpoints without a
training, as the start ``TEST_START``. The variable ``TEST_FATE`` says which ``rank`` strikes, if it
is not None, before which ``operation`` on files of the run, and ``kills_all`` whether all ranks are
killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from pipectl.runs import RunDirectory
from pipectl.runtime.checkpoint import Keep, Saver, take_snapshot
from pipectl.runtime.manifest import Manifest
from pipectl.runtime.optimizer import Updater
from pipectl.runtime.rank_process import run_rank
from pipectl.runtime.worker import run
from pipectl.watch.board import Board

STRUCK = "struck.json"
ENTRIES = ("os.remove", "os.rmdir")
"""What happens to the entries of a folder that is removed, by their names alone."""


def await_fate(checkpoints: Path, communicator: MPI.Comm) -> None:
    """Look at every operation on the files of the run, and strike before one of them."""
    fate, pids = json.loads(os.environ["TEST_FATE"]), communicator.allgather(os.getpid())
    if fate["rank"] != communicator.rank:
        return
    run = str(checkpoints.parent)
    operations = fate["operation"]

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal operations
        path = str(arguments[0]) if arguments else ""
        at_files = event.startswith(("open", "os.", "shutil.")) and path.startswith(run)
        if at_files or event in ENTRIES:
            operations -= 1
            if operations == 0:
                strike()

    def strike() -> None:
        found = {"names": os.listdir(checkpoints), "pids": pids}  # noqa: PTH208
        (checkpoints.parent / STRUCK).write_text(json.dumps(found))
        for pid in pids if fate["kills_all"] else []:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(see)


def train(directory: RunDirectory, communicator: MPI.Intracomm, board: Board) -> None:
    await_fate(directory.checkpoints, communicator)
    run(directory, communicator, board)


def save(directory: Path, steps: list[int], keep: int) -> None:
    """Write checkpoints whose one tensor is their step."""
    await_fate(directory, MPI.COMM_SELF)
    saver = Saver(MPI.COMM_SELF, directory, Keep(keep), int(os.environ["TEST_START"]), print)
    for step in steps:
        states = {"model.a": torch.full((3,), float(step)), "loss.b": torch.ones(2)}
        own = take_snapshot(states, {"model.a": "model.a"}, Updater(None, None), {})
        saver.start(Manifest(step, 4, {}), own)
    saver.finish()


if __name__ == "__main__":
    if sys.argv[1] == "--save":
        directory, keep, *steps = sys.argv[2:]
        save(Path(directory), [*map(int, steps)], int(keep))
    else:
        run_rank(train, __doc__)
