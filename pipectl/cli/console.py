"""What the commands print with. Text from users is never read as markup."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from pipectl.printable import printable, printable_json

_WIDTH_WITHOUT_TERMINAL = 120


def plain(text: object, style: str = "") -> Text:
    """Text shown as it is: no markup, no control characters (a newline or tab may stay)."""
    return Text(printable(text), style=style)


def joined(*parts: Text) -> Text:
    """Pieces side by side, each keeping its own style."""
    return Text.assemble(*parts)


def print_anything() -> None:
    """Let a terminal that is not UTF-8 show ``?`` for what it cannot show, and none take all."""
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def nobody_reads(end: BaseException) -> bool:
    """Whether the reader of what is printed is gone, as ``head`` is.

    Args:
        end: what printing came to; typer and rich make an exit of it.
    """
    return isinstance(end, BrokenPipeError) or isinstance(end.__context__, BrokenPipeError)


def discard_unwritten() -> None:
    """Forget what could not be written, of which python would complain once more at the end."""
    for stream in filter(None, (sys.__stdout__, sys.__stderr__)):
        try:
            stream.flush()
        except OSError:
            with _nowhere() as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
        except ValueError:  # it is closed
            continue


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def output() -> Console:
    """The console of standard output; without a terminal it has no colours and a fixed width."""
    return _console(stderr=False)


def errors() -> Console:
    """The console of standard error: messages, warnings, progress."""
    return _console(stderr=True)


def say(text: object, style: str = "") -> None:
    """One line or more on standard output, never wrapped (paths stay whole)."""
    output().print(plain(text, style), soft_wrap=True)


def note(text: object, style: str = "dim") -> None:
    """What happens meanwhile, on standard error, so that output can be piped."""
    errors().print(plain(text, style), soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning to standard error, if there is one."""
    if text:
        note(f"warning: {text}")


def short(path: Path) -> str:
    """A path as it can be typed from here: relative where it lies below the current directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def say_json(value: Any) -> None:
    """A machine-readable answer; JSON has no numbers that are not finite, which become null."""
    sys.stdout.write(f"{printable_json(_finite(value), indent=1)}\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    fixed = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH_WITHOUT_TERMINAL
    return Console(stderr=stderr, width=fixed, highlight=False, markup=False, emoji=False)
