"""Exceptions. Each class defines the exit code of the command that fails with it.

    PipectlError                1   a job or a worker failed, or any error not named below
    ├── WorkerError             1   training failed on a rank
    │   └── StepError           1   training failed in a step
    ├── FaultError              1   a fault of pipectl itself, not of the user's job
    ├── OutOfTimeError          1   planning ended before there was a plan
    ├── UsageError              2   a wrong command line, a directory that cannot be written
    ├── InvalidInputError       3   a spec, profile, cluster or plan that cannot be used
    │   ├── SpecError           3   the job spec; lists every problem with line and column
    │   ├── DataFileError       3   profile.json, cluster.json, plan.json or another data file
    │   ├── CaptureError        3   a factory or model that cannot be captured
    │   ├── ScheduleError       3   a schedule or plan whose ranks could not work together
    │   └── MismatchError       3   files or processes that do not belong together
    ├── InfeasibleError         4   no plan fits the ranks and the memory
    ├── SchedulerError          5   the batch system is missing, unreachable, or rejects a request
    └── UnknownRunError         6   no such run, or its state cannot be determined

Only job scripts exit with 75 (checkpointed, requeue); 130 is an interrupt.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class PipectlError(Exception):
    """An error shown to the user: what is wrong and what to do about it.

    Args:
        message: what is wrong, with the name of the file, field or object.
        hint: what the user can do; printed on a line of its own.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class WorkerError(PipectlError):
    """Training failed on a rank."""


class StepError(WorkerError):
    """A step of the training failed, perhaps an earlier one than the rank is in.

    Args:
        step: number of the step.
    """

    def __init__(self, message: str, *, step: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.step = step


class FaultError(PipectlError):
    """A fault of pipectl itself, which nothing in the user's job explains.

    Attributes:
        has_details: whether the hint names the place of the details.
    """

    has_details = False


class OutOfTimeError(PipectlError):
    """The budget or the user ended a search before it had a result."""


class UsageError(PipectlError):
    """The command line cannot be carried out."""

    exit_code = 2


class InvalidInputError(PipectlError):
    """A file or object from the user cannot be used."""

    exit_code = 3


@dataclass(frozen=True, order=True)
class Problem:
    """One fault in a file. ``line`` and ``column`` count from 1; 0 means no position."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.message}"


class SpecError(InvalidInputError):
    """The job spec is invalid. Holds every problem once, in file order."""

    def __init__(self, problems: Sequence[Problem], *, hint: str | None = None) -> None:
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(str(problem) for problem in self.problems), hint=hint)


class DataFileError(InvalidInputError):
    """A data file (profile, cluster, plan, record) is missing, truncated or inconsistent."""


class CaptureError(InvalidInputError):
    """A model factory fails, or its model cannot be captured as a graph."""


class ScheduleError(InvalidInputError):
    """The rank programs of a plan cannot run: unknown schedule, deadlock, lost message, memory."""


class MismatchError(InvalidInputError):
    """Two things that must agree do not: profile and model, plan and MPI size, worker and plan."""


class InfeasibleError(PipectlError):
    """No plan satisfies the constraints; the message states how much is missing."""

    exit_code = 4


class SchedulerError(PipectlError):
    """The batch system is missing, rejected the request or did not answer."""

    exit_code = 5


class UnknownRunError(PipectlError):
    """No run has this name, or its state cannot be determined."""

    exit_code = 6


LESS_MEMORY = (
    "resume it with a memory limit below what a rank gets: "
    "pipectl resume RUN --set pipeline.memory_limit=SIZE"
)
"""What to do if a rank lacks memory."""


_NO_MEMORY = ("allocate memory", "out of memory", "bad_alloc", "cublas_status_alloc_failed")


class _Limit(NamedTuple):
    """A limit of processes, which shells set and batch systems hand on to their jobs.

    Args:
        number: of the limit in :mod:`resource`.
        what: it limits.
        command: that shows it.
        errors: numbers of the errors that it causes.
        words: parts of their messages, in lower case.
        other_words: parts of messages of such errors that have another cause.
    """

    number: int
    what: str
    command: str
    errors: tuple[int, ...]
    words: tuple[str, ...]
    other_words: tuple[str, ...] = ()


_LIMITS = (
    _Limit(
        resource.RLIMIT_FSIZE, "bytes of a file", "ulimit -f", (errno.EFBIG,), ("file too large",)
    ),
    _Limit(
        resource.RLIMIT_NOFILE, "open files", "ulimit -n", (errno.EMFILE,), ("too many open files",)
    ),
    _Limit(
        resource.RLIMIT_NPROC,
        "processes and threads",
        "ulimit -u",
        (errno.EAGAIN,),
        ("start new thread", "resource temporarily unavailable"),
        ("lock",),  # a file that another process has locked, or that would block
    ),
    _Limit(
        resource.RLIMIT_AS,
        "bytes of address space",
        "ulimit -v",
        (errno.ENOMEM,),
        ("failed to map", *_NO_MEMORY),
    ),
)


def limit_of(error: BaseException | None) -> str:
    """Return the limit of this process that an error or its cause has hit, for its message:
    ``; 4,096 bytes of a file are allowed here (`ulimit -f`)``. Empty if there is none, or if the
    message has it."""
    while error is not None:
        text = "out of memory" if isinstance(error, MemoryError) else str(error).lower()
        number = getattr(error, "errno", None)
        for limit in _LIMITS:
            value = resource.getrlimit(limit.number)[0]
            is_hit = number in limit.errors or any(words in text for words in limit.words)
            if limit.command in text:
                return ""
            if any(words in text for words in limit.other_words):
                continue
            if is_hit and value != resource.RLIM_INFINITY:
                return f"; {value:,} {limit.what} are allowed here (`{limit.command}`)"
        error = error.__cause__ or error.__context__
    return ""


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error of Python or torch reports that memory is exhausted."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(each in text for each in _NO_MEMORY)
