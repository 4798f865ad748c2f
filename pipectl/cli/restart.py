"""Commands that run the user's code start again under the hash seed of their job.

The first start, before anything is read, takes the seed of the environment; a second one follows if
the job sets another. Only a process that runs one command from its own arguments starts again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.errors import UsageError
from pipectl.hash_seed import VARIABLE, seed_variables

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

_COMMANDS = ("profile", "submit", "lab verify", "lab rehearse")
_own_words: list[str] = []
"""The arguments of this process, if it may start again."""


def restart_for_command(words: Sequence[str]) -> None:
    """Start again if these arguments of the process name a command that may run the user's code."""
    command = " ".join(word for word in words if not word.startswith("-"))
    if f"{command} ".startswith(tuple(f"{each} " for each in _COMMANDS)):
        _own_words[:] = words
        _restart({})


def restart_for_job(spec: JobSpec, job: Path) -> None:
    """Start again if a job sets another hash seed, before the command prints or changes anything.

    Args:
        job: the job file; one that is a stream could not be read again.
    """
    if VARIABLE in spec.environment.variables and job.is_file():
        _restart(spec.environment.variables)


def _restart(variables: Mapping[str, str]) -> None:
    """Start this process again with the same arguments, unless it runs under the seed of a job.

    It goes on if its program came from standard input or is not what Python was started with, and
    if Python ignores the environment.

    Raises:
        UsageError: it cannot be started again.
    """
    words, started = list(_own_words), sys.orig_argv
    is_own = len(started) > len(words) > 0 and started[-len(words) :] == words
    if not is_own or sys.argv[0] in ("", "-") or sys.flags.ignore_environment:
        return
    needed = seed_variables(variables)
    seed = needed[VARIABLE]
    if os.environ.get(VARIABLE) == seed:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, *started[1:]]
    try:
        os.execve(sys.executable, command, {**os.environ, **needed})
    except OSError as error:
        raise UsageError(
            f"{sys.executable} cannot start again with {VARIABLE}={seed}: {error.strerror}",
            hint=f"set it before: export {VARIABLE}={seed}",
        ) from None
