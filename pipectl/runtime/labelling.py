"""Putting a rank's number before every line that it prints, whoever prints it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pipectl
from pipectl.batch import process
from pipectl.runs import ATTEMPT, RUN_VARIABLE, RunDirectory

_PATIENCE_S, _PAUSE_S = 2.0, 0.005
_STREAMS = (1, 2)
_kept: list[int] = []
"""Where this process's output went before, while it is labelled."""


@contextmanager
def labelled(name: str) -> Iterator[None]:
    """Send the output of this process through :mod:`pipectl.watch.relay`, in jobs.

    What libraries in C and child processes write goes there, too. At the end it has been passed on.
    Where no further process can be started, nothing changes.
    """
    relay = _start(name) if RUN_VARIABLE in os.environ else None
    if relay is None:
        yield
        return
    try:
        yield
    finally:
        _flush()
        for stream in reversed(_STREAMS):
            os.dup2(kept := _kept.pop(), stream)
            os.close(kept)
        _await(relay)


def unlabelled() -> int | None:
    """The standard error as it was; None while it is what it is."""
    return _kept[-1] if _kept else None


def _start(name: str) -> int | None:
    """Start the process and send the output there; its pid."""
    run = RunDirectory(Path(os.environ[RUN_VARIABLE]))
    late = str(run.late_log(name, os.environ.get(ATTEMPT, "1")))
    theirs, ours = os.pipe()
    argv = [sys.executable, "-S", "-m", "pipectl.watch.relay", name, late]
    environment = {**os.environ, "PYTHONPATH": str(Path(pipectl.__file__).parents[1])}
    pid = process.start_companion(argv, stdin=theirs, keep=(), env=environment, stdout=1)
    os.close(theirs)
    if pid is not None:
        _flush()
        for stream in _STREAMS:
            _kept.append(os.dup(stream))
            os.dup2(ours, stream)
    os.close(ours)
    return pid


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by user code
            stream.flush()


def _await(pid: int) -> None:
    """Give it time to pass on the last words; a child that goes on printing may keep it longer."""
    until = time.monotonic() + _PATIENCE_S
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
            time.sleep(_PAUSE_S)
