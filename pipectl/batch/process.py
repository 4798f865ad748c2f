"""The one place that starts, watches and signals other processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from pathlib import Path

import psutil

from pipectl.access import open_regular
from pipectl.errors import SchedulerError
from pipectl.watch.rank import process_state

TIMEOUT_S = 60.0
_LAST_WORDS_S = 1.0
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
    """Within, no command of :func:`run` is waited for longer than this."""
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


def environment_without(*prefixes: str, kept: Collection[str] = ()) -> dict[str, str]:
    """Our environment without the variables that begin so.

    Args:
        kept: names of some that stay.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith(prefixes)
    }


def start_detached(argv: Sequence[str], *, output: Path, directory: Path) -> int:
    """Start a command in a session of its own, so that it outlives us; return its pid.

    Raises:
        SchedulerError: it cannot be started, or ``output`` cannot be written.
    """
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(open_regular(output, flags), "ab") as log:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                start_new_session=True,
            )
    except OSError as error:
        raise SchedulerError(
            f"{argv[0]}: cannot be started: {error}", cure="check the run directory and its disk"
        ) from error
    process.returncode = 0  # detached on purpose: no warning when the object goes
    return process.pid


def wait_for_any() -> int | None:
    """Wait until a process that this one has started ends; its pid, None if there is none."""
    try:
        return os.wait()[0]
    except ChildProcessError:
        return None


def start_companion(
    argv: Sequence[str],
    *,
    stdin: int,
    env: Mapping[str, str],
    stderr: int,
) -> int | None:
    """Start a small process beside this one, in a session of its own; its pid.

    Args:
        stdin: file descriptor that it reads from.
        stderr: file descriptor that its words for the log go to.

    Returns:
        None where no process can be started.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=env,
            cwd="/",
            start_new_session=True,
        )
    except OSError:
        return None
    process.returncode = 0  # it ends by itself: no warning when the object goes
    return process.pid


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone or a zombie.

    Together with the pid this names a process for good: a reused pid has another start.
    """
    state = process_state(pid)
    return None if state is None else state.started


def commands() -> Iterator[tuple[int, list[str]]]:
    """Pid and command line of every process of ours; others' may say anything."""
    for found in psutil.process_iter(["cmdline", "uids"]):
        user = found.info["uids"]
        if user is not None and user.real == os.getuid():
            yield found.pid, found.info["cmdline"] or []


def stop(pid: int, grace_s: float) -> None:
    """Ask a process and its group to end; kill what is left of it and its descendants.

    MPI puts ranks into sessions of their own, so that the group alone does not hold all of them.
    The process itself goes last: a job script then still writes its exit code.

    Raises:
        SchedulerError: the process belongs to somebody else.
    """
    family = _family(pid)
    try:
        os.killpg(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise SchedulerError(
            f"process {pid} belongs to somebody else", cure="cancel it as its owner"
        ) from None
    _, alive = psutil.wait_procs(family, timeout=grace_s)
    late = {child for member in alive for child in _family(member.pid)}
    leader = {member for member in alive if member.pid == pid}
    _kill({*alive, *late} - leader)
    _, leader_alive = psutil.wait_procs(leader, timeout=_LAST_WORDS_S)
    _kill(leader_alive)


def _kill(members: Iterable[psutil.Process]) -> None:
    """SIGKILL, and wait until they are gone."""
    members = list(members)
    for member in members:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            member.kill()
    psutil.wait_procs(members, timeout=_LAST_WORDS_S)


def _family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants; each is known by pid and start, so none is mistaken."""
    try:
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
