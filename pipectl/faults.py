"""Whose fault an exception is, the user's code or pipectl's, and what is said of one of ours."""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any

from pipectl.errors import FaultError, PipectlError, lacks_memory
from pipectl.files import write_json, write_text
from pipectl.units import printable

_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_LIBRARIES = (
    "site-packages",
    "dist-packages",
    f"{sys.prefix}/lib/python",
)
_STANDARD_LIBRARY = str(Path(os.__file__).parent)
_CAPTURED = "<eval_with_key>"
"""Begins the names of files that torch gives to the code of captured graphs."""


def is_user_code(filename: str) -> bool:
    """Whether a file is neither of this package nor of Python or an installed one."""
    if filename.startswith((_PACKAGE, _STANDARD_LIBRARY, "<")):
        return False
    return not any(library in filename for library in _LIBRARIES)


def user_line(trace: TracebackType | None) -> str:
    """``" (at file.py:12)"`` for the deepest frame outside installed packages, or nothing."""
    frames = [frame for frame in traceback.extract_tb(trace) if is_user_code(frame.filename)]
    return f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def is_ours(error: BaseException) -> bool:
    """Whether nothing explains an exception but a fault of pipectl.

    What the user's code calls counts as the user's, and so does an operator of the captured model;
    but not a function of pipectl that one of them calls. Missing files, memory or messages are
    faults of the machine.
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
    """What to say of such an exception; where its details are is for the caller to add."""
    from pipectl.versions import installed_versions, untested_torch

    first = next(iter(str(error).strip().splitlines()), "")
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    untested = untested_torch()
    versions = f"{installed_versions()} ({untested})" if untested else installed_versions()
    fault = FaultError(f"this is a fault of pipectl, not of your job: {what}", cure=versions)
    fault.__cause__ = error
    return fault


def with_details(error: BaseException, file: Path | None, *, write: bool = False) -> BaseException:
    """An exception, or the fault of pipectl that it is, which says which file holds its details.

    Args:
        file: None for one among the system's temporary files, if it is to be written.
        write: whether to write the details, so that only their owner can read them.
    """
    fault = fault_of(error) if is_ours(error) else error
    if isinstance(fault, FaultError) and not fault.has_details:
        if write:
            file = _write_details(file, fault)
        where = "the output of: pipectl --debug ..." if file is None else str(file)
        fault.cure = f"please report it with {where}\n{fault.cure}"
        fault.has_details = True
    return fault


@dataclass(frozen=True)
class ErrorReport:
    """Why a rank, or the preparation of a job, failed: a file in the folder of errors of its run.

    Args:
        rank: None for the preparation.
        stage, step, action: what it did; stage and step are None for what belongs to none.
        type: class of the exception; None for a rank that was lost.
        time: seconds since the epoch.
        exit_code: that commands have.
    """

    message: str = "no message"
    rank: int | None = None
    stage: int | None = None
    step: int | None = None
    action: str = ""
    host: str = ""
    type: str | None = None
    cure: str | None = None
    traceback: str = ""
    time: float = inf
    exit_code: int = 1

    @classmethod
    def of(cls, error: BaseException, cure: str | None = None, **place: Any) -> ErrorReport:
        """What is to be said of an exception.

        Args:
            cure: of one that has none itself.
            place: ``rank``, ``stage``, ``step`` and ``action``.
        """
        own_error = error if isinstance(error, PipectlError) else None
        documented = (kind for kind in type(error).__mro__ if kind.__module__ == "pipectl.errors")
        return cls(
            message=own_error.message if own_error else str(error) or "no message",
            host=os.uname().nodename,
            type=next(documented, type(error)).__name__,
            cure=own_error.cure if own_error else cure,
            traceback="".join(traceback.format_exception(error)),
            time=time.time(),
            exit_code=own_error.exit_code if own_error else 1,
            **place,
        )

    @property
    def where(self) -> str:
        """``rank 3 on n1, stage 2, BACKWARD micro-batch 5, step 17``."""
        host = f" on {self.host}" if self.host else ""
        if self.rank is None:
            return f"preparation{host}"
        parts = (
            "" if self.stage is None else f"stage {self.stage}",
            self.action,
            "" if self.step is None else f"step {self.step}",
        )
        return ", ".join((f"rank {self.rank}{host}", *filter(None, parts)))

    @property
    def what(self) -> str:
        """The message, after the class of the exception."""
        return f"{self.type}: {self.message}" if self.type else self.message

    @property
    def text(self) -> str:
        """All of it for people, fit for terminals; it ends with a line end."""
        cure = f"pipectl: {self.cure}" if self.cure else ""
        parts = (f"pipectl: {self.where}: {self.what}", self.traceback, cure)
        return "".join(f"{printable(part.rstrip())}\n" for part in parts if part)

    def save(self, path: Path) -> None:
        """Write its file, if that is possible: the disk may fail, too."""
        with suppress(PipectlError, OSError):
            write_json(path, {"version": 1, **asdict(self)})


def _write_details(place: Path | None, fault: FaultError) -> Path | None:
    text = f"{fault.cure}\n\n{''.join(traceback.format_exception(fault))}"
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
