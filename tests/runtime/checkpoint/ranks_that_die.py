"""Ranks that train until they are killed, by themselves and so at the moment that was chosen.

``--run DIRECTORY`` trains, and ``--save DIRECTORY KEEP STEP...`` writes some checkpoints without a
training. What happens is in the variable ``TEST_FATE``: ``rank`` decides and kills the ``victims``,
which are itself (``rank``), ``all`` or the ``launcher``. It does so once it has begun ``saves``
checkpoints, before the given ``operation`` on their files, or if that is 0, after ``delay_s``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from pipectl.runs import ATTEMPT, RunDirectory
from pipectl.runtime.checkpoint import Keep, Saver, take_snapshot
from pipectl.runtime.manifest import Manifest
from pipectl.runtime.optimizer import Updater
from pipectl.runtime.process import run_rank
from pipectl.runtime.worker import run
from pipectl.watch.board import Board

STRUCK = "struck.json"
ENTRIES = ("os.remove", "os.rmdir")
"""What happens to the entries of a folder that is removed, by their names alone."""


def strike(victims: str, directory: Path, pids: list[int]) -> None:
    found = {"names": os.listdir(directory), "pids": pids}  # noqa: PTH208
    (directory.parent / STRUCK).write_text(json.dumps(found))
    if victims == "launcher":
        proxy = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(proxy.rpartition(")")[2].split()[1]), signal.SIGKILL)
        return
    for pid in pids if victims == "all" else []:
        if pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def await_fate(directory: Path, communicator: MPI.Comm) -> None:
    """Look at every operation on the files of checkpoints, and strike before one of them."""
    fate, pids = json.loads(os.environ["TEST_FATE"]), communicator.allgather(os.getpid())
    if fate["victims"] == "" or fate["rank"] != communicator.rank:
        return
    saves, operations = fate["saves"], fate["operation"]
    begun = set[str]()

    def strike_later() -> None:
        timer = threading.Timer(fate["delay_s"], strike, (fate["victims"], directory, pids))
        timer.daemon = True
        timer.start()

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal saves, operations
        path = str(arguments[0]) if arguments else ""
        if saves:
            if event == "os.mkdir" and Path(path).parent == directory and path not in begun:
                begun.add(path)
                saves -= 1
                if not (saves or operations):
                    strike_later()
            return
        at_files = event.startswith(("open", "os.", "shutil.")) and path.startswith(str(directory))
        if operations and (at_files or event in ENTRIES):
            operations -= 1
            if not operations:
                strike(fate["victims"], directory, pids)

    if saves == operations == 0:
        strike_later()
    sys.addaudithook(see)


def train(directory: RunDirectory, communicator: MPI.Intracomm, board: Board) -> None:
    await_fate(directory.checkpoints, communicator)
    run(directory, communicator, board)


def save(directory: Path, steps: list[int], keep: int) -> None:
    """Write checkpoints whose one tensor is their step."""
    await_fate(directory, MPI.COMM_SELF)
    saver = Saver(MPI.COMM_SELF, directory, Keep(keep), int(os.environ[ATTEMPT]), print)
    for step in steps:
        states = {"model.a": torch.full((3,), float(step)), "loss.b": torch.ones(2)}
        own = take_snapshot(states, {"model.a"}, Updater(None, None), {})
        saver.start(Manifest(step, 4, {}), own)
    saver.finish()


if __name__ == "__main__":
    if sys.argv[1] == "--save":
        directory, keep, *steps = sys.argv[2:]
        save(Path(directory), [*map(int, steps)], int(keep))
    else:
        run_rank(train, __doc__)
