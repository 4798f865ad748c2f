"""Decides whether an exception is a fault of the user's code or of pipectl, and reports it."""

from __future__ import annotations

import os
import re
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

from pipectl import errors
from pipectl.errors import (
    FaultError,
    InvalidInputError,
    PipectlError,
    lacks_memory,
    limit_of,
)
from pipectl.fields import LenientFields, Rule
from pipectl.files import write_json, write_text
from pipectl.libraries import is_library
from pipectl.units import printable

LAUNCH = "LAUNCH"
"""Action of the report of a launcher that has started no rank."""
_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_PLACE = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)
_CAPTURED = "<eval_with_key>"
"""Prefix of the file names that torch gives to the code of captured graphs."""


def is_user_code(filename: str) -> bool:
    """Return whether a file belongs neither to pipectl, to Python nor to an installed package."""
    return not (filename.startswith((_PACKAGE, "<")) or is_library(filename))


def user_line(trace: TracebackType | None) -> str:
    """Return ``" (at file.py:12)"`` for the deepest frame of user code, or an empty string."""
    frames = [frame for frame in traceback.extract_tb(trace) if is_user_code(frame.filename)]
    return f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def user_line_in(text: str) -> str:
    """The same, of a traceback that is printed in a text."""
    places = [place for place in _PLACE.findall(text) if is_user_code(place[0])]
    return " (at {}:{})".format(*places[-1]) if places else ""


def is_ours(error: BaseException) -> bool:
    """Return whether only a fault of pipectl can explain an exception.

    Code that the user's code or an operator of the captured model calls counts as the user's,
    except functions of pipectl. Missing files, memory or messages count as faults of the machine.
    """
    if not isinstance(error, Exception) or isinstance(error, PipectlError | OSError):
        return False
    if lacks_memory(error) or type(error).__module__.startswith("mpi4py"):
        return False
    ours = True
    for frame in traceback.extract_tb(error.__traceback__):
        if is_user_code(frame.filename) or frame.filename.startswith(_CAPTURED):
            ours = False
        elif frame.filename.startswith(_PACKAGE):
            ours = True
    return ours


def fault_of(error: BaseException) -> FaultError:
    """Return the error that reports an exception as a fault of pipectl, without its details."""
    from pipectl.versions import installed_versions, untested

    first = next(iter(str(error).strip().splitlines()), "")
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    warnings = "; ".join(filter(None, map(untested, ("torch", "typer"))))
    versions = f"{installed_versions()} ({warnings})" if warnings else installed_versions()
    fault = FaultError(f"this is a fault of pipectl, not of your job: {what}", hint=versions)
    fault.__cause__ = error
    return fault


def with_details(error: BaseException, file: Path | None, *, write: bool = False) -> BaseException:
    """Return the exception, or the error that reports it as a fault of pipectl, with its details.

    Args:
        file: file of the details; if None and ``write`` is true, a temporary file.
        write: whether to write the details; only their owner can read the file.
    """
    fault = fault_of(error) if is_ours(error) else error
    if isinstance(fault, FaultError) and not fault.has_details:
        if write:
            file = _write_details(file, fault)
        where = "the output of: pipectl --debug ..." if file is None else str(file)
        fault.hint = f"please report it with {where}\n{fault.hint}"
        fault.has_details = True
    return fault


@dataclass(frozen=True)
class ErrorReport(LenientFields):
    """Why a rank, or the preparation of a job, failed: one file in the run's error directory.

    Args:
        message: what went wrong.
        rank: number of the rank; None for the preparation.
        stage, step, action: what the rank was doing; stage and step are None if there is none, and
            step is 0 before training.
        host: name of its machine.
        type: class of the exception; None if the rank was lost.
        hint: what to do.
        traceback: of the exception.
        time: seconds since the epoch.
        exit_code: exit code of the command.
    """

    message: str = "no message"
    rank: int | None = None
    stage: int | None = None
    step: int | None = None
    action: str = ""
    host: str = ""
    type: str | None = None
    hint: str | None = None
    traceback: str = ""
    time: float = inf
    exit_code: Annotated[int, Rule(range(1, 128).__contains__, "from 1 to 127")] = 1

    @classmethod
    def of(cls, error: BaseException, hint: str | None = None, **place: Any) -> ErrorReport:
        """Make the report of an exception.

        Args:
            hint: used if the exception has none.
            place: ``rank``, ``stage``, ``step`` and ``action``.
        """
        own_error = error if isinstance(error, PipectlError) else None
        if own_error is not None:
            message = own_error.message
        else:
            message = f"{str(error) or 'no message'}{user_line(error.__traceback__)}"
        message += limit_of(error)
        documented = (kind for kind in type(error).__mro__ if kind.__module__ == "pipectl.errors")
        return cls(
            message=message,
            host=os.uname().nodename,
            type=next(documented, type(error)).__name__,
            hint=own_error.hint if own_error else hint,
            traceback="".join(traceback.format_exception(error)),
            time=time.time(),
            exit_code=own_error.exit_code if own_error else 1,
            **place,
        )

    @property
    def has_file(self) -> bool:
        """Whether a rank or the preparation wrote it, not the launcher that starts them."""
        return self.action != LAUNCH

    @property
    def where(self) -> str:
        """For example ``rank 3 on n1, stage 2, BACKWARD micro-batch 5, step 17``."""
        host = f" on {self.host}" if self.host else ""
        if self.rank is None:
            return f"{'start' if self.action == LAUNCH else 'preparation'}{host}"
        parts = (
            "" if self.stage is None else f"stage {self.stage}",
            self.action,
            "before the first step" if self.step == 0 else "",
            f"step {self.step}" if self.step else "",
        )
        return ", ".join((f"rank {self.rank}{host}", *filter(None, parts)))

    @property
    def what(self) -> str:
        """The class of the exception and the message."""
        return f"{self.type}: {self.message}" if self.type else self.message

    @property
    def text(self) -> str:
        """The whole report, safe to print on a terminal; ends with a newline."""
        hint = f"pipectl: {self.hint}" if self.hint else ""
        parts = (f"pipectl: {self.where}: {self.what}", self.traceback, hint)
        return "".join(f"{printable(part.rstrip())}\n" for part in parts if part)

    def to_error(self) -> PipectlError:
        """The error, for another process than that in which it was raised."""
        kind = getattr(errors, self.type or "", None)
        if kind is errors.SpecError:  # which has places besides
            kind = InvalidInputError
        if not (isinstance(kind, type) and issubclass(kind, PipectlError)):
            return PipectlError(self.what, hint=self.hint)
        if issubclass(kind, errors.StepError):
            return kind(self.message, step=self.step or 0, hint=self.hint)
        error: PipectlError = kind(self.message, hint=self.hint)
        if isinstance(error, FaultError):
            error.has_details = True
        return error

    def save(self, path: Path) -> None:
        """Write the report. Errors are ignored, because the disk may be what failed."""
        with suppress(PipectlError, OSError):
            write_json(path, {"version": 1, **asdict(self)})


def _write_details(place: Path | None, fault: FaultError) -> Path | None:
    text = f"{fault.hint}\n\n{''.join(traceback.format_exception(fault))}"
    with suppress(OSError, PipectlError):
        if place is not None:
            write_text(place, text, mode=0o600, durable=False)
            return place
        import tempfile

        handle, name = tempfile.mkstemp(prefix="pipectl-fault-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
        return Path(name)
    return None
