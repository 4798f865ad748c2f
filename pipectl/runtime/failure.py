"""The process of a rank, and what it leaves behind when it fails."""

from __future__ import annotations

import argparse
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

from pipectl.errors import PipectlError, lacks_memory
from pipectl.files import write_json
from pipectl.graph import TransferKind
from pipectl.printable import printable
from pipectl.runs import RunDirectory
from pipectl.runtime.labelling import labelled
from pipectl.runtime.waiting import tell_of_waits
from pipectl.schedule.actions import Kind
from pipectl.watch.board import Board
from pipectl.watch.words import Names, action

_NAMES = Names([kind.name for kind in Kind], [kind.value for kind in TransferKind])


class Doing:
    """What the rank is doing right now, for error reports and whoever watches it.

    Attributes:
        board: on which it stands.
    """

    def __init__(self) -> None:
        self.board = Board()
        self.action = "starting"
        tell_of_waits(self.board.waits)

    @property
    def step(self) -> int:
        """Under way; 0 before the first."""
        return self.board.read().step

    @step.setter
    def step(self, number: int) -> None:
        self.board.step(number)

    @property
    def stage(self) -> int:
        """-1 where what it does belongs to none."""
        return self.board.read().stage

    @property
    def action(self) -> str:
        """In words."""
        return action(self.board.read(), _NAMES)

    @action.setter
    def action(self, phase: str) -> None:
        self.board.phase(phase)


Work = Callable[[RunDirectory, MPI.Intracomm, Doing], None]


def run_rank(work: Work, description: str | None) -> None:
    """Do a rank's work in the directory that the command line names.

    Exits, and so lets MPI abort all ranks, where it fails.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    directory = RunDirectory(parser.parse_args().run)
    with labelled(str(MPI.COMM_WORLD.rank)):
        code = _exit_code_of(work, directory, MPI.COMM_WORLD)
    if code is not None:
        sys.exit(code)


def _exit_code_of(work: Work, directory: RunDirectory, communicator: MPI.Intracomm) -> int | None:
    """Do the work; None where it does not fail."""
    doing = Doing()
    try:
        work(directory, communicator, doing)
    except BaseException as error:
        report(
            directory,
            communicator.rank,
            error,
            action=doing.action,
            stage=doing.stage,
            step=doing.step,
        )
        return error.exit_code if isinstance(error, PipectlError) else 1
    return None


def warn(text: str) -> None:
    """Put a line into the log."""
    sys.stderr.write(printable(f"pipectl: {text}\n"))
    sys.stderr.flush()


def report(
    directory: RunDirectory,
    rank: int,
    error: BaseException,
    *,
    action: str,
    stage: int | None = None,
    step: int | None = None,
) -> None:
    """Write what failed on this rank, and where, for ``pipectl status`` and into the log."""
    known = {"rank": rank, "stage": stage, "step": step}
    words = [f"{name} {value}" for name, value in known.items() if value is not None]
    place = ", ".join((*words, action))
    sys.stderr.write(printable(f"pipectl: {place}: {type(error).__name__}: {error}\n"))
    if not isinstance(error, PipectlError):
        sys.stderr.write(printable("".join(traceback.format_exception(error))))
    try:
        document = {"version": 1, **known, "action": action, **_details(error)}
        write_json(directory.error_of(rank), document)
    except PipectlError as unwritten:
        sys.stderr.write(printable(f"pipectl: {unwritten}\n"))
    sys.stderr.flush()


def _details(error: BaseException) -> dict[str, Any]:
    known = error if isinstance(error, PipectlError) else None
    return {
        "host": socket.gethostname(),
        "type": type(error).__name__,
        "message": known.message if known else str(error) or "no message",
        "cure": known.cure if known else _cure(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
        "exit_code": known.exit_code if known else 1,
    }


def _cure(error: BaseException) -> str | None:
    """For what is no fault of the user's code."""
    if not lacks_memory(error):
        return None
    return "set pipeline.memory_limit below what a rank gets, and plan again"
