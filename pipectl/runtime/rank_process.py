"""The process of a rank: its log, its current action, and its error report.

A rank writes directly to its log, not through another process that could end it. Output of C
libraries and child processes goes there too. Up to :data:`MAX_FILES` ranks have a file each; if
there are more, the ranks of a node share one, in which lines printed by Python start with the rank.
A few lines go to the log of the job.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from mpi4py import MPI

from pipectl.errors import LESS_MEMORY, FaultError, PipectlError, StepError, lacks_memory
from pipectl.faults import ErrorReport, with_details
from pipectl.files import write_log, write_text
from pipectl.runs import RUN_VARIABLE, RunDirectory, start_of_job
from pipectl.runtime.nodes import node_name
from pipectl.runtime.waiting import barrier, tell_of_waits
from pipectl.units import printable
from pipectl.watch.board import Board

MAX_FILES = 256
_STREAMS = (1, 2)
_job_log: list[int] = []
"""Where this process's output went before, while it has a log of its own."""


@contextmanager
def own_log(rank: int, ranks: int) -> Iterator[None]:
    """Redirect the output of this process to the log of a rank, in jobs.

    If the log cannot be opened, nothing changes.
    """
    handle = -1
    if RUN_VARIABLE in os.environ:
        run = RunDirectory(Path(os.environ[RUN_VARIABLE]))
        path = run.rank_log(rank) if ranks <= MAX_FILES else run.node_log(node_name())
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError):
            handle = os.open(path, flags, 0o600)
    if handle < 0:
        yield
        return
    label = b"" if ranks <= MAX_FILES else b"[%d] " % rank
    usual = sys.stdout, sys.stderr
    _flush()
    saved_streams = [os.dup(stream) for stream in _STREAMS]
    for number in _STREAMS:
        os.dup2(handle, number)
    os.close(handle)
    logs = [_LogStream(number, label) for number in _STREAMS]
    buffers = [io.BufferedWriter(log) for log in logs]
    how = "utf-8", "backslashreplace"
    streams = [io.TextIOWrapper(buffer, *how, line_buffering=True) for buffer in buffers]
    sys.stdout, sys.stderr = streams
    _job_log.append(saved_streams[-1])
    try:
        yield
    finally:
        _flush(sys.stdout, sys.stderr, *streams)
        for log in logs:
            log.end_line()
        sys.stdout, sys.stderr = usual
        _job_log.pop()
        for number, before in zip(_STREAMS, saved_streams, strict=True):
            os.dup2(before, number)
            os.close(before)


def job_log() -> int:
    """File descriptor of the job's log."""
    return _job_log[-1] if _job_log else 2


def say(text: str) -> None:
    """Write a line for people into the job's log."""
    _flush()
    write_log(job_log(), f"{printable(text)}\n")


class _LogStream(io.RawIOBase):
    """A log whose writes never fail: output that a full disk does not accept is lost.

    Args:
        label: prefix of every line; lines are then written whole.
    """

    def __init__(self, handle: int, label: bytes) -> None:
        super().__init__()
        self._handle, self._label = handle, label
        self._unfinished_line = b""

    def fileno(self) -> int:
        return self._handle

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        text = bytes(data)  # type: ignore[call-overload]
        size = len(text)
        if self._label:
            *lines, self._unfinished_line = (self._unfinished_line + text).split(b"\n")
            text = b"".join(b"%b%b\n" % (self._label, line) for line in lines)
        with suppress(OSError):
            while text:
                text = text[os.write(self._handle, text) :]
        return size

    def end_line(self) -> None:
        """Write the rest of an unfinished line."""
        if self._unfinished_line:
            self.write(b"\n")


def _flush(*streams: TextIO) -> None:
    for stream in streams or (sys.stdout, sys.stderr):
        with suppress(Exception):  # user code has closed it, or put something else in its place
            stream.flush()


Work = Callable[[RunDirectory, MPI.Intracomm, Board], None]


def run_rank(work: Work, description: str | None) -> None:
    """Do a rank's work in the directory that the command line names, and show it on a board.

    If it fails, exits so that MPI aborts all ranks.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    directory = RunDirectory(parser.parse_args().run)
    communicator, code = MPI.COMM_WORLD, None
    rank = communicator.rank
    begin(directory, rank)
    with own_log(rank, communicator.size):
        board = Board()
        board.phase("starting")
        tell_of_waits(board.waits)
        try:
            work(directory, communicator, board)
        except BaseException as raised:
            error = with_details(raised, start_of_job(directory).error_of(rank))
            now = board.read()
            stage = None if now.stage < 0 else now.stage
            place: dict[str, Any] = {"action": now.action, "stage": stage, "step": now.step}
            if isinstance(error, StepError):  # not what the rank has begun since
                place = {"action": "", "stage": None, "step": error.step}
            report(directory, rank, error, **place)
            code = error.exit_code if isinstance(error, PipectlError) else 1
        else:
            finish(directory, communicator)
    if code is not None:
        sys.exit(code)


def begin(directory: RunDirectory, rank: int) -> None:
    """Tell the job script that the ranks have begun. A file is removed, as disks may be full."""
    if rank == 0:
        with suppress(OSError):
            start_of_job(directory).starting.unlink(missing_ok=True)


def finish(directory: RunDirectory, communicator: MPI.Intracomm) -> None:
    """Tell the job script that all ranks have done their work: a failure from now on, such as one
    of a library at the end of the process, does not undo it. Collective."""
    with suppress(MPI.Exception, PipectlError, OSError):  # another rank may have ended already
        barrier(communicator)
        if communicator.rank == 0:
            write_text(start_of_job(directory).finished, "")


def warn(text: str) -> None:
    """Put a warning into the job's log."""
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
    """Write this rank's error, and where it occurred, for ``pipectl status`` and the job's log."""
    start = start_of_job(directory)
    hint, memory = LESS_MEMORY if lacks_memory(error) else None, start.memory_of(rank)
    if hint is not None and memory.exists():
        hint += f"\nto see what was in memory: open {memory} at https://pytorch.org/memory_viz"
    failure = ErrorReport.of(error, hint, rank=rank, stage=stage, step=step, action=action)
    failure.save(start.error_of(rank))
    if isinstance(error, PipectlError) and not isinstance(error, FaultError):
        failure = replace(failure, traceback="")
    write_log(job_log(), failure.text)
