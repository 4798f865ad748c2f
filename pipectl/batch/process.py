"""The one place that starts, watches and signals other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from pathlib import Path

import psutil

from pipectl.errors import SchedulerError
from pipectl.watch.rank import process_state

TIMEOUT_S = 60.0
_LAST_WORDS_S = 1.0
_LOOK_S = 0.02
_patience_s = ContextVar("patience_s", default=inf)


class NoAnswerError(SchedulerError):
    """A command did not finish in time; what it was asked to do may have happened."""


@dataclass(frozen=True)
class Completed:
    """A finished command; the texts have no trailing white space."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def message(self) -> str:
        """What it wrote on standard error, or on standard output, or its exit code."""
        return self.stderr or self.stdout or f"exit code {self.returncode}"


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Limit the time that :func:`run` waits for a command."""
    before = _patience_s.set(seconds)
    try:
        yield
    finally:
        _patience_s.reset(before)


def run(
    argv: Sequence[str],
    *,
    cure: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = TIMEOUT_S,
    stdin: str = "",
) -> Completed:
    """Run a command to its end, without a shell.

    Args:
        cure: what to do when the command does not exist.
        timeout_s: None waits as long as it takes, within :func:`patience`.
        stdin: what it reads.

    Raises:
        SchedulerError: no such command, or it may not be executed.
        NoAnswerError: not done within ``timeout_s``.
    """
    limit_s = min(inf if timeout_s is None else timeout_s, _patience_s.get())
    try:
        done = subprocess.run(
            list(argv),
            env=env,
            timeout=None if limit_s == inf else limit_s,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(
            f"{argv[0]}: no answer within {limit_s:.0f} s", cure="try again in a minute"
        ) from None
    except OSError as error:
        raise SchedulerError(f"{argv[0]}: {error.strerror or error}", cure=cure) from None
    return Completed(done.returncode, done.stdout.rstrip(), done.stderr.rstrip())


def start_detached(
    argv: Sequence[str],
    *,
    directory: Path,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.STDOUT,
    env: Mapping[str, str] | None = None,
) -> int:
    """Start a program in a session of its own, so that it outlives us; its pid.

    Args:
        stdin, stdout, stderr: file descriptors.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        list(argv),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=directory,
        env=env,
        start_new_session=True,
    )
    process.returncode = 0  # detached on purpose: no warning when the object goes
    return process.pid


def wait_for_any() -> int | None:
    """Wait until a process that this one has started ends; its pid, None if there is none."""
    try:
        return os.wait()[0]
    except ChildProcessError:
        return None


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone or a zombie.

    Together with the pid this names a process for ever: a reused pid has another start.
    """
    state = process_state(pid)
    return None if state is None else state.started


def stop(pid: int, grace_s: float) -> None:
    """Ask a process and its group to end; kill what is left of it and its descendants.

    MPI puts ranks into sessions of their own, so that the group alone does not hold all of them.
    The process itself goes last: a job script then still writes its exit code.

    Raises:
        SchedulerError: the process belongs to somebody else.
    """
    try:
        leader = psutil.Process(pid)
        family = [leader, *leader.children(recursive=True)]
        os.killpg(pid, signal.SIGTERM)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return
    except PermissionError:
        raise SchedulerError(
            f"process {pid} belongs to somebody else", cure="cancel it as its owner"
        ) from None
    alive = _wait(family, grace_s)
    for member in [*alive]:
        with suppress(psutil.NoSuchProcess):
            alive += member.children(recursive=True)
    _kill({*alive} - {leader})
    _kill(_wait([leader], _LAST_WORDS_S))


def _kill(members: Iterable[psutil.Process]) -> None:
    """SIGKILL, and wait until they are gone."""
    members = list(members)
    for member in members:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            member.kill()
    _wait(members, _LAST_WORDS_S)


def _wait(members: Iterable[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Wait for processes to end; those that have not.

    A zombie has ended. In a container there may be nobody who removes those of others, which
    psutil would wait for.
    """
    deadline = time.monotonic() + limit_s
    while True:
        alive = [each for each in members if each.is_running() and start_time(each.pid) is not None]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(_LOOK_S)
