"""From an exception to one message and an exit code; a traceback only when debugging."""

from __future__ import annotations

import os
import sys
import traceback
from errno import EDQUOT, EFBIG, EIO, ENOSPC

import typer

from pipectl.cli.console import errors, joined, plain
from pipectl.cli.renamed import new_option
from pipectl.errors import FaultError, PipectlError, SpecError
from pipectl.faults import fault_of, is_ours, user_line, with_file
from pipectl.printable import printable

DEBUG_VARIABLE = "PIPECTL_DEBUG"
INTERRUPTED = 130
_UNWRITTEN = (ENOSPC, EDQUOT, EFBIG, EIO)
UNREAD = 141
"""What a shell makes of SIGPIPE, by which other programs end here."""


def report(error: BaseException) -> int:
    """Tell the user about ``error`` on standard error.

    Returns:
        The documented exit code.
    """
    if os.environ.get(DEBUG_VARIABLE):
        sys.stderr.write(printable("".join(traceback.format_exception(error))))
    code, messages, cure = _describe(error)
    _print(messages, cure)
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
        message = new_option(error) or error.format_message()
        return error.exit_code, [message], _help_command(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED, ["interrupted"], None
    if isinstance(error, OSError) and error.filename is not None:
        return 1, [f"{error.filename}: {error.strerror or error}"], None
    if isinstance(error, OSError) and error.errno in _UNWRITTEN:
        return 1, [f"the output cannot be written: {error.strerror}"], "free some space"
    if is_ours(error):
        return _describe(fault_of(error))
    cure = "pipectl --debug ... shows the traceback"
    return 1, [f"{type(error).__name__}: {error}{user_line(error.__traceback__)}"], cure


def _help_command(error: typer.TyperException) -> str | None:
    context = getattr(error, "ctx", None)
    return None if context is None else f"see: {context.command_path} --help"


def _print(messages: list[str], cure: str | None) -> None:
    console = errors()
    for message in messages:
        console.print(joined(plain("error: ", "bold red"), plain(message)), soft_wrap=True)
    for line in (cure or "").splitlines():
        console.print(plain(f"  {line}"), soft_wrap=True)
