"""A table of one-line cells, drawn in a few microseconds a cell: rich's own takes far longer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

_BETWEEN = 2
_LEAST = 8


class Rows:
    """Columns side by side below their heads; the first is shortened where it gets too wide.

    Args:
        columns: cells by head, equally many of each; the style of a cell is that of all its text.
        right: heads of the columns that end together.
        optional: heads of columns that go where all their cells are empty, and then one after the
            other, the first here first, until the rest is not wider than ``room``.
        room: terminal cells of a line; None for as many as it takes.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[Text]],
        right: Collection[str] = (),
        *,
        optional: Sequence[str] = (),
        room: int | None = None,
    ) -> None:
        empty = {head for head in optional if not any(columns[head])}
        self._columns = {head: cells for head, cells in columns.items() if head not in empty}
        self._right = right
        self._widths = {head: _width(head, cells) for head, cells in self._columns.items()}
        for head in optional:
            if room is not None and self.width > room and head in self._columns:
                del self._columns[head], self._widths[head]

    @property
    def heads(self) -> tuple[str, ...]:
        """The columns that there are."""
        return tuple(self._columns)

    @property
    def width(self) -> int:
        """Terminal cells of a line."""
        return sum(self._widths.values()) + _BETWEEN * (len(self._columns) - 1)

    def __rich_measure__(self, _console: Console, _options: ConsoleOptions) -> Measurement:
        return Measurement(self.width, self.width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = list(self._widths.values())
        over = self.width - options.max_width
        if over > 0:
            widths[0] = max(min(_LEAST, widths[0]), widths[0] - over)
        heads = [Text(head, style="bold") for head in self._columns]
        styles: dict[str, Style] = {}
        for cells in (heads, *zip(*self._columns.values(), strict=True)):
            for cell in cells:
                if str(cell.style) not in styles:
                    styles[str(cell.style)] = console.get_style(cell.style)
            line = list(self._line(cells, widths, styles))
            if over > 0:
                line = Segment.adjust_line_length(line, options.max_width, pad=False)
            yield from line
            yield Segment.line()

    def _line(
        self, cells: Sequence[Text], widths: Sequence[int], styles: Mapping[str, Style]
    ) -> Iterator[Segment]:
        before = ""
        for head, cell, width in zip(self._columns, cells, widths, strict=True):
            text = cell.plain.replace("\n", " ")
            if cell_len(text) > width:
                text = set_cell_size(text, width - 1) + "…"
            room = " " * (width - cell_len(text))
            before += room if head in self._right else ""
            if cell.style:
                yield Segment(before)
                yield Segment(text, styles[str(cell.style)])
                before = ""
            else:
                before += text
            before += " " * _BETWEEN + ("" if head in self._right else room)
        yield Segment(before.rstrip())


def _width(head: str, cells: Sequence[Text]) -> int:
    return max(map(cell_len, (head, *(cell.plain for cell in cells))))
