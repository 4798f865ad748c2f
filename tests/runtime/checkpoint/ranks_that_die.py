"""Ranks that train until they are killed, by themselves and so at the moment that was chosen.

``--run DIRECTORY`` trains, and ``--save DIRECTORY KEEP STEP...`` writes some checkpoints without a
training. What happens is in the variable ``TEST_FATE``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
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

FATE, STRUCK = "TEST_FATE", "struck.json"
ENTRIES = ("os.remove", "os.rmdir")
"""What happens to the entries of a folder that is removed, by their names alone."""


@dataclass
class Fate:
    """When a rank is killed, and who with it.

    Args:
        rank: that decides.
        victims: ``rank``, ``all`` or ``launcher``; the empty word if nobody is killed.
        saves: checkpoints that it begins to write before; 0 counts from the start.
        operation: on the files of checkpoints since then, before which it happens; 0 if
            ``delay_s`` says when.
    """

    rank: int = 0
    victims: str = ""
    saves: int = 0
    operation: int = 0
    delay_s: float = 0.0

    @classmethod
    def given(cls) -> Fate:
        return cls(**json.loads(os.environ.get(FATE, "{}")))


class Killer:
    """Sees every operation on the files of checkpoints, and strikes before one of them."""

    def __init__(self, fate: Fate, directory: Path, communicator: MPI.Comm) -> None:
        self._fate, self._directory = fate, directory
        self._pids = communicator.allgather(os.getpid())
        self._left = fate.operation if fate.saves == 0 else 0
        self._saves = fate.saves
        self._seen = set[str]()
        self._struck = False
        if communicator.rank == fate.rank and fate.victims:
            if fate.saves == 0 and not fate.operation:
                self._later()
            sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._struck or not self._concerns(event, arguments):
            return
        if self._saves:
            self._count_saves(event, str(arguments[0]))
        elif self._left:
            self._left -= 1
            if not self._left:
                self.strike()

    def _count_saves(self, event: str, path: str) -> None:
        new = event == "os.mkdir" and Path(path).parent == self._directory
        if not new or path in self._seen:
            return
        self._seen.add(path)
        self._saves -= 1
        if not self._saves:
            self._left = self._fate.operation
            if not self._left:
                self._later()

    def _concerns(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event in ENTRIES:
            return True
        if not event.startswith(("open", "os.", "shutil.")) or not arguments:
            return False
        return str(arguments[0]).startswith(str(self._directory))

    def _later(self) -> None:
        def wait_and_strike() -> None:
            time.sleep(self._fate.delay_s)
            self.strike()

        threading.Thread(target=wait_and_strike, daemon=True).start()

    def strike(self) -> None:
        self._struck = True
        found = {"names": os.listdir(self._directory), "pids": self._pids}  # noqa: PTH208
        (self._directory.parent / STRUCK).write_text(json.dumps(found))
        launcher = os.getppid() if self._fate.victims == "launcher" else 0
        if launcher:
            os.kill(_parent(launcher), signal.SIGKILL)
            return
        for pid in self._pids if self._fate.victims == "all" else [os.getpid()]:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def train(directory: RunDirectory, communicator: MPI.Intracomm, board: Board) -> None:
    Killer(Fate.given(), directory.checkpoints, communicator)
    run(directory, communicator, board)


def save(directory: Path, steps: list[int], keep: int) -> None:
    """Write checkpoints whose one tensor is their step."""
    Killer(Fate.given(), directory, MPI.COMM_SELF)
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
