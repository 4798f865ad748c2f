"""Printing. Text from users is never read as markup."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipectl.units import printable, printable_json

_WIDTH_WITHOUT_TERMINAL = 120
_GAP = 2
"""Between the columns of a table."""


def output(*, stderr: bool = False) -> Console:
    """The console of standard output; without a terminal it has no colours and a fixed width."""
    stream = sys.stderr if stderr else sys.stdout
    fixed = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH_WITHOUT_TERMINAL
    return Console(stderr=stderr, width=fixed, highlight=False, markup=False, emoji=False)


def errors() -> Console:
    """The console of standard error: messages, warnings, progress."""
    return output(stderr=True)


def plain(text: object, style: str = "") -> Text:
    """Text without markup and without control characters other than newlines and tabs."""
    return Text(printable(text), style=style)


def say(text: object, style: str = "") -> None:
    """Print lines on standard output, unwrapped, so that paths stay whole."""
    output().print(plain(text, style), soft_wrap=True)


def note(text: object, style: str = "dim") -> None:
    """Print a message on standard error, so that output can be piped."""
    errors().print(plain(text, style), soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning to standard error, if there is one."""
    if text:
        note(f"warning: {text}")


def say_json(value: Any) -> None:
    """Print JSON on standard output. Numbers that are not finite become null."""
    sys.stdout.write(f"{printable_json(_finite(value), indent=1)}\n")


def short_path(path: Path) -> str:
    """A path as it can be typed from here: relative if it is below the current directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def label_lines(
    lines: Iterable[tuple[str, str, str]], indent: int, width: int | None = None, bold: bool = False
) -> Iterator[Text]:
    """Lines of a label, a text and its style; the lines of a text stand below each other.

    Args:
        indent: column at which texts begin.
        width: to which texts are folded, between words; None leaves them whole.
        bold: whether labels are.
    """
    for label, text, style in lines:
        parts = text.splitlines() or [""]
        if width is not None and width >= 2 * indent:
            fold = partial(
                textwrap.wrap,
                width=width - indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            parts = [piece for part in parts for piece in fold(part) or [""]]
        for number, part in enumerate(parts):
            head = plain(f"{'' if number else label:<{indent}}", "bold" if bold else "")
            yield head.append_text(plain(part, style))


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: Collection[str] = (),
    optional: Sequence[str] = (),
    width: int | None = None,
    wrap: bool = False,
) -> Table:
    """Rows of cells below the heads of their columns; cells that are no `Text` are shown plainly.

    Args:
        left: the columns of words; figures stand on the right.
        optional: columns that are left out if all their cells are empty, and then one after the
            other, the first here first, until the rest is not wider than ``width``.
        width: terminal cells of a line; None for as many as it takes.
        wrap: whether cells may take several lines; else the first column is cut if need be.
    """
    texts = [[cell if isinstance(cell, Text) else plain(cell) for cell in row] for row in rows]
    columns = list(zip(*texts, strict=True)) or [()] * len(heads)
    widths = [
        max(map(cell_len, (head, *(cell.plain for cell in cells))))
        for head, cells in zip(heads, columns, strict=True)
    ]
    indices = [i for i, head in enumerate(heads) if head not in optional or any(columns[i])]
    for head in optional:
        if width is not None and sum(widths[i] + _GAP for i in indices) - _GAP > width:
            indices = [i for i in indices if heads[i] != head]
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for i in indices:
        grid.add_column(
            heads[i],
            justify="left" if heads[i] in left else "right",
            no_wrap=not wrap and i > 0,
            overflow="ellipsis",
        )
    for row in texts:
        grid.add_row(*(row[i] for i in indices))
    return grid


def replace_unprintable() -> None:
    """Print ``?`` for what a stream cannot encode. Replace closed streams by ``/dev/null``."""
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def discard_unwritten() -> None:
    """Drop output that cannot be written, so that Python does not report it again at exit."""
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


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
