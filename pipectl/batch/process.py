"""Other programs: starting them, waiting for them, and ending them with all that they have started.

Only this module uses ``subprocess``. Lost ranks are ended by the watcher of their node, which must
start fast and imports nothing of this (:mod:`pipectl.watch`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from pipectl.errors import SchedulerError
from pipectl.watch import ProcessState, process_state

TIMEOUT_S = 60.0
_OF_SHELLS = frozenset({"BASH_ENV", "BASHOPTS", "ENV", "POSIXLY_CORRECT", "SHELLOPTS"})
"""Variables with which bash runs a file of the user first, or reads what follows in another way."""
_LAST_WORDS_S = 1.0
_LOOK_S = 0.02
_RULE = re.compile(r"[-=*]{20,}\s*")
_OF_OPEN_MPI = re.compile(r"\[[\w.-]+:\d+\] ")


class NoAnswerError(SchedulerError):
    """It is not known whether a command has taken effect.

    Args:
        said: what the command printed; may be empty.
    """

    def __init__(self, message: str, *, hint: str | None = None, said: str = "") -> None:
        super().__init__(message, hint=hint)
        self.said = said


@dataclass(frozen=True)
class Completed:
    """A finished command; texts have no trailing white space."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def message(self) -> str:
        """Standard error, otherwise standard output, otherwise the exit code or signal."""
        end = f"exit code {self.returncode}"
        if self.returncode < 0:
            end = f"ended by signal {-self.returncode}"
        return self.stderr or self.stdout or end

    @property
    def error_line(self) -> str:
        """Of the message: the last line before the texts between rules in which Open MPI explains
        how ranks ended; without one, the first line of the last such text."""
        lines = [line for line in self.message.splitlines() if line.strip()] or [self.message]
        rules = [index for index, line in enumerate(lines) if _RULE.fullmatch(line)]
        if len(rules) < 2:
            return lines[-1]
        before = [line for line in lines[: rules[0]] if not _OF_OPEN_MPI.match(line)]
        return before[-1] if before else lines[min(rules[-2] + 1, len(lines) - 1)]


def run(
    argv: Sequence[str],
    *,
    hint: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    stdin: str = "",
) -> Completed:
    """Run a command to its end, without a shell.

    Args:
        hint: what to do if the command does not exist.
        stdin: text for standard input.

    Raises:
        SchedulerError: the command cannot be executed.
        NoAnswerError: it did not finish within ``timeout_s``.
    """
    try:
        child = subprocess.Popen(
            list(argv),
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise SchedulerError(f"{argv[0]}: {error.strerror or error}", hint=hint) from None
    with child:
        try:
            limit_s = None if timeout_s == inf else timeout_s
            stdout, stderr = child.communicate(stdin, limit_s)
        except BaseException as error:
            _end_with_descendants(child)
            if isinstance(error, subprocess.TimeoutExpired):
                words = _decoded(error.stderr) or _decoded(error.stdout)
                said = f"; it said:\n{words}" if words else ""
                raise NoAnswerError(
                    f"{argv[0]}: no answer within {timeout_s:.0f} s{said}",
                    hint="try again in a minute",
                ) from None
            raise
    return Completed(child.returncode, stdout.rstrip(), stderr.rstrip())


def fault_of_bash(text: str) -> str:
    """Return what bash says of lines that it cannot read; empty if it can."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_SHELLS}
    env = {**kept, "LC_ALL": "C"}  # or it may complain of the locale
    done = run(["bash", "-O", "extglob", "-n"], hint="install bash", env=env, stdin=text)
    return (done.stderr or f"exit code {done.returncode}") if done.returncode or done.stderr else ""


def search_path(*first: Path) -> dict[str, str]:
    """Return PYTHONPATH for a process with another working directory; empty if it is not needed.

    Args:
        first: directories that are searched before those of this process.
    """
    known = os.environ.get("PYTHONPATH")
    paths = [*map(str, first), *(known.split(os.pathsep) if known else ())]
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))} if paths else {}


def run_with_progress(
    argv: Sequence[str],
    tell: Callable[[str], None],
    *,
    directory: Path,
    env: Mapping[str, str],
    patience_s: float,
) -> Completed:
    """Run a program of pipectl to its end; it shares neither terminal nor signals with this one.

    Args:
        tell: called with each line of its standard output.
        directory: its working directory.
        patience_s: after Ctrl-C, time in which it may end by itself, on SIGINT.

    Returns:
        How it ended, without its standard output.

    Raises:
        OSError: it cannot be started.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as words:
        child = subprocess.Popen(
            list(argv),
            cwd=directory,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                tell(line.rstrip("\n"))
            child.wait()
        except BaseException:
            child.stdout.close()
            child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(patience_s)
            raise
        finally:
            if child.poll() is None:
                _end_with_descendants(child)
                child.wait()
            child.stdout.close()
        words.seek(0)
        return Completed(child.returncode, "", words.read().rstrip())


def _decoded(output: bytes | str | None) -> str:
    """Return what a command printed before its time was over; in bytes, whatever the encoding."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return text.strip()


def _end_with_descendants(child: subprocess.Popen[str]) -> None:
    """Kill a child and what it has started, such as ranks, which would keep its output open."""
    if (leader := process_state(child.pid)) is not None:
        _kill(_with_descendants([leader]))
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    child.kill()


def start_detached(
    argv: Sequence[str],
    *,
    directory: Path,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.STDOUT,
    env: Mapping[str, str] | None = None,
) -> int:
    """Start a program in its own session, so that it outlives this process; return its pid.

    Args:
        stdin, stdout, stderr: file descriptors.

    Raises:
        OSError: the program cannot be started.
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
    process.returncode = 0  # detached on purpose: no warning when the object is deleted
    return process.pid


def wait_for_any() -> int | None:
    """Wait until a child process ends; return its pid, None if there is no child."""
    try:
        return os.wait()[0]
    except ChildProcessError:
        return None


def has_ended(child: int) -> bool:
    """Return whether a child process has ended, also if other code has waited for it."""
    try:
        return os.waitpid(child, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return start_time(child) is None


def kill_child(child: int) -> None:
    """Kill a child process, and wait for its end."""
    with suppress(OSError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended.

    Together with the pid, this identifies a process: a reused pid has another start.
    """
    state = process_state(pid)
    return None if state is None else state.started


def list_processes() -> list[ProcessState]:
    """Return all live processes of this machine."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208
    return [state for state in map(process_state, pids) if state is not None]


def stop(pid: int, grace_s: float) -> None:
    """Terminate a process group; kill the remaining descendants, and the process itself last.

    MPI puts ranks into sessions of their own, outside the group. A job script that ends last can
    still write its exit code.

    Raises:
        SchedulerError: the process belongs to another user.
    """
    leader = process_state(pid)
    if leader is None:
        return
    family = _with_descendants([leader])
    try:
        os.killpg(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise SchedulerError(
            f"process {pid} belongs to another user", hint="cancel it as its owner"
        ) from None
    alive = _with_descendants(_wait(family, grace_s))
    _kill([each for each in alive if each.pid != pid])
    _kill(_wait([leader], _LAST_WORDS_S))


def _with_descendants(members: Sequence[ProcessState]) -> list[ProcessState]:
    family, others = list(members), list_processes()
    for member in family:  # which grows
        family += [each for each in others if each.parent == member.pid and each not in family]
    return family


def _kill(members: Sequence[ProcessState]) -> None:
    """Send SIGKILL, and wait until the processes have ended."""
    for member in _wait(members, 0.0):
        with suppress(OSError):
            os.kill(member.pid, signal.SIGKILL)
    _wait(members, _LAST_WORDS_S)


def _wait(members: Iterable[ProcessState], limit_s: float) -> list[ProcessState]:
    """Wait for processes to end; return those that have not."""
    deadline = time.monotonic() + limit_s
    while True:
        members = [each for each in members if process_state(each.pid, each.started) is not None]
        if not members or time.monotonic() > deadline:
            return members
        time.sleep(_LOOK_S)
