"""Errors as messages and exit codes, and signals as interrupts."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from types import FrameType

import typer

from pipectl.cli.console import errors, plain
from pipectl.errors import FaultError, PipectlError, SpecError
from pipectl.faults import fault_of, is_ours, user_line, with_file
from pipectl.printable import printable

DEBUG_VARIABLE = "PIPECTL_DEBUG"
INTERRUPTED = 130
UNREAD = 141
"""Exit code of programs that SIGPIPE ends."""
_UNWRITTEN = (ENOSPC, EDQUOT, EFBIG, EIO)
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def report(error: BaseException) -> int:
    """Print ``error`` on standard error, with its traceback when debugging.

    Returns:
        The documented exit code.
    """
    if os.environ.get(DEBUG_VARIABLE):
        sys.stderr.write(printable("".join(traceback.format_exception(error))))
    code, messages, cure = _describe(error)
    console = errors()
    for message in messages:
        console.print(plain("error: ", "bold red").append_text(plain(message)), soft_wrap=True)
    for line in (cure or "").splitlines():
        console.print(plain(f"  {line}"), soft_wrap=True)
    return code


def _describe(error: BaseException) -> tuple[int, list[str], str | None]:
    """Exit code, messages and cure."""
    if isinstance(error, FaultError):
        error = with_file(error)
    if isinstance(error, SpecError):
        return error.exit_code, [str(problem) for problem in error.problems], error.cure
    if isinstance(error, PipectlError):
        return error.exit_code, [error.message], error.cure
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        cure = None if context is None else f"see: {context.command_path} --help"
        return error.exit_code, [error.format_message()], cure
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED, ["interrupted"], None
    if isinstance(error, OSError) and error.filename is not None:
        return 1, [f"{error.filename}: {error.strerror or error}"], None
    if isinstance(error, OSError) and error.errno in _UNWRITTEN:
        return 1, [f"output cannot be written: {error.strerror}"], "free some space"
    if is_ours(error):
        return _describe(fault_of(error))
    cure = "pipectl --debug ... shows the traceback"
    return 1, [f"{type(error).__name__}: {error}{user_line(error.__traceback__)}"], cure


def nobody_reads(end: BaseException) -> bool:
    """Whether the reader of a pipe has closed it, as ``head`` does.

    Args:
        end: error raised while printing; typer and rich turn a broken pipe into an exit.
    """
    return isinstance(end, BrokenPipeError) or isinstance(end.__context__, BrokenPipeError)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C.

    Only the first signal counts, so that a second one does not end the cleanup. Signals that are
    ignored (`nohup`) or have a handler already are left alone.
    """

    def interrupt(_number: int, frame: FrameType | None) -> None:
        for number in ours:
            signal.signal(number, signal.SIG_IGN)
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    ours = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
