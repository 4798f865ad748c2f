"""Print text, tables and JSON. Text from users is never read as markup."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from pipectl.units import printable, printable_json

_WIDTH_WITHOUT_TERMINAL = 80
_UNBROKEN = "\N{NO-BREAK SPACE}"
_GAP = 2
"""Spaces between the columns of a table."""
_MIN_CUT = 16
"""Minimum width of a column that is cut."""


def output(*, stderr: bool = False) -> Console:
    """Console of standard output; without a terminal it has no colours, and 80 columns.

    The variable ``COLUMNS`` sets another width.
    """
    stream = sys.stderr if stderr else sys.stdout
    fixed = None if _has_width(stream) else _WIDTH_WITHOUT_TERMINAL
    return Console(stderr=stderr, width=fixed, highlight=False, markup=False, emoji=False)


def _has_width(stream: TextIO) -> bool:
    """Whether a stream is a terminal, or the user has set its width. What notebooks and widgets put
    in its place may lack methods."""
    is_terminal = getattr(stream, "isatty", lambda: False)
    return is_terminal() or "COLUMNS" in os.environ


def errors() -> Console:
    """Console of standard error, for messages, warnings and progress."""
    return output(stderr=True)


def plain(text: object, style: str = "") -> Text:
    """Text without markup and without control characters other than newlines and tabs."""
    return Text(printable(text), style=style)


class Fitted(NamedTuple):
    """A text or table that is drawn for the width of the console, in columns."""

    draw: Callable[[int], RenderableType]

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.draw(options.max_width)


def show(*parts: RenderableType) -> None:
    """Print tables and lines on standard output; a line that was not wrapped stays whole."""
    output().print(*parts, sep="\n", crop=False)


def say(text: object, style: str = "") -> None:
    """Print lines on standard output without wrapping them, so paths stay whole."""
    output().print(plain(text, style), soft_wrap=True)


def note(text: object, style: str = "dim") -> None:
    """Print a message on standard error, so output can be piped."""
    errors().print(plain(text, style), soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning to standard error, if there is one."""
    if text:
        note(f"warning: {text}")


def say_json(value: Any) -> None:
    """Print JSON on standard output. Numbers that are not finite become null, and what the stream
    cannot encode is escaped: a program needs the exact text."""
    finite = _finite(value)
    text = printable_json(finite, indent=1)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(finite, indent=1, allow_nan=False)
    sys.stdout.write(f"{text}\n")


def short_path(path: Path) -> str:
    """A path relative to the current directory if it is in it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def whole(text: str) -> str:
    """A command or path that :func:`label_lines` does not wrap."""
    return text.replace(" ", _UNBROKEN)


def labels(lines: Sequence[tuple[str, str, str]], indent: int, style: str = "") -> Fitted:
    """Lines that begin with labels; see :func:`label_lines`."""
    return Fitted(lambda width: Group(*label_lines(lines, indent, width, style)))


def label_lines(
    lines: Iterable[tuple[str, str, str]], indent: int, width: int, label_style: str = ""
) -> Iterator[Text]:
    """Lines that begin with labels; all lines of a text start in the same column.

    Args:
        lines: labels, texts and their styles.
        indent: column of the texts.
        width: columns to wrap texts to, between words; longer words stay whole.
        label_style: style of the labels.
    """
    fold = partial(
        textwrap.wrap,
        width=max(indent, width - indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for label, text, style in lines:
        parts = [piece for part in text.splitlines() or [""] for piece in fold(part) or [""]]
        for number, part in enumerate(parts):
            head = plain(f"{'' if number else label:<{indent}}", label_style)
            part = part.replace(_UNBROKEN, " ")
            # the label's style is not the text's
            yield Text.assemble(head, plain(part, style), no_wrap=True, overflow="ignore")


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: Collection[str] = (),
    optional: Sequence[str] = (),
    cut: str = "",
    wrap: bool = False,
) -> Fitted:
    """A table with heads; cells that are not `Text` have no style.

    Args:
        left: heads of left-aligned columns; the others are right-aligned.
        optional: columns that are left out if all their cells are empty, and then, in this order,
            until the table fits the width of the console.
        cut: one of them that is cut, if that suffices, in place of being left out.
        wrap: whether cells may wrap; else the first column is cut if necessary, on terminals.
    """
    texts = [[cell if isinstance(cell, Text) else plain(cell) for cell in row] for row in rows]
    columns = list(zip(*texts, strict=True)) or [()] * len(heads)
    widths = [
        max(map(cell_len, (head, *(cell.plain for cell in cells))))
        for head, cells in zip(heads, columns, strict=True)
    ]
    filled = [i for i, head in enumerate(heads) if head not in optional or any(columns[i])]

    def needed_for(indices: Sequence[int]) -> int:
        return sum(widths[i] + _GAP for i in indices) - _GAP

    def draw(width: int) -> Table:
        indices, needed = filled, needed_for(filled)
        cut_width = None
        for head in optional:
            if needed > width:
                left_width = widths[heads.index(head)] - (needed - width) if head == cut else 0
                if left_width >= _MIN_CUT:
                    cut_width, needed = left_width, width
                    break
                indices = [i for i in indices if heads[i] != head]
                needed = needed_for(indices)
        is_whole = not wrap and needed > width and not _has_width(sys.stdout)
        size = needed if is_whole else None  # a script reads the names
        grid = Table(box=None, pad_edge=False, header_style="bold", width=size)
        for i in indices:
            grid.add_column(
                heads[i],
                justify="left" if heads[i] in left else "right",
                no_wrap=not wrap and i > 0,
                max_width=cut_width if heads[i] == cut else None,
                overflow="fold" if wrap else "ellipsis",
            )
        for row in texts:
            grid.add_row(*(row[i] for i in indices))
        return grid

    return Fitted(draw)


def replace_unprintable() -> None:
    """Print ``?`` for what a stream cannot encode; replace closed streams by ``/dev/null``."""
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def discard_unwritten() -> None:
    """Drop output that cannot be written, so Python does not report it again at exit."""
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
