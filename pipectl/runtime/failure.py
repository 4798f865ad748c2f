"""The process of a rank, and what it leaves behind when it fails."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mpi4py import MPI

from pipectl.errors import FaultError, PipectlError, lacks_memory
from pipectl.faults import ErrorReport, with_details
from pipectl.files import write_log
from pipectl.runs import RunDirectory
from pipectl.runtime.output import job_log, own_log, say
from pipectl.runtime.waiting import tell_of_waits
from pipectl.watch.board import Board


class Doing:
    """What the rank is doing right now, for error reports and whoever watches it.

    Attributes:
        board: on which it stands.
        each_step: what the rank that started its node's watcher looks after, now and then.
    """

    def __init__(self) -> None:
        self.board = Board()
        self.each_step: Callable[[], None] | None = None
        self.action = "starting"
        tell_of_waits(self.board.waits)

    @property
    def step(self) -> int:
        """Under way; 0 before the first."""
        return self.board.read().step

    @step.setter
    def step(self, number: int) -> None:
        self.board.step(number)
        if self.each_step is not None:
            self.each_step()

    @property
    def stage(self) -> int | None:
        """None if what it does belongs to none."""
        stage = self.board.read().stage
        return None if stage < 0 else stage

    @property
    def action(self) -> str:
        """In words."""
        return self.board.read().action

    @action.setter
    def action(self, phase: str) -> None:
        self.board.phase(phase)


Work = Callable[[RunDirectory, MPI.Intracomm, Doing], None]


def run_rank(work: Work, description: str | None) -> None:
    """Do a rank's work in the directory that the command line names.

    Exits, and so lets MPI abort all ranks, if it fails.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    directory = RunDirectory(parser.parse_args().run)
    communicator, code = MPI.COMM_WORLD, None
    rank = communicator.rank
    with own_log(rank, communicator.size):
        doing = Doing()
        try:
            work(directory, communicator, doing)
        except BaseException as raised:
            error = with_details(raised, directory.error_of(rank))
            report(directory, rank, error, action=doing.action, stage=doing.stage, step=doing.step)
            code = error.exit_code if isinstance(error, PipectlError) else 1
    if code is not None:
        sys.exit(code)


def warn(text: str) -> None:
    """Put a line into the job's log."""
    say(f"pipectl: {text}")


def report(
    directory: RunDirectory,
    rank: int,
    error: BaseException,
    *,
    action: str,
    stage: int | None = None,
    step: int | None = None,
) -> None:
    """Write what failed on this rank, and where, for ``pipectl status`` and into the job's log."""
    memory = "set pipeline.memory_limit below what a rank gets, and plan again"
    cure = memory if lacks_memory(error) else None
    failure = ErrorReport.of(error, cure, rank=rank, stage=stage, step=step, action=action)
    failure.save(directory.error_of(rank))
    if isinstance(error, PipectlError) and not isinstance(error, FaultError):
        failure = replace(failure, traceback="")
    write_log(job_log(), failure.text)
