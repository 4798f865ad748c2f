"""Tables as all commands print them, of which very long ones leave out their middle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import pairwise

from rich.table import Table

from pipectl.cli.console import plain

_MOST_ROWS, _FIRST, _LAST = 24, 12, 4
_GAP = "…"


def table(*heads: str, left: Collection[str] = (), no_wrap: bool = True) -> Table:
    """An empty table.

    Args:
        heads: of the columns.
        left: the columns of words; figures stand on the right.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        made.add_column(head, justify="left" if head in left else "right", no_wrap=no_wrap)
    return made


def add_rows(
    to: Table, rows: Collection[int], count: int, cells: Callable[[int], Iterable[object]], gap: int
) -> None:
    """Add some of ``count`` rows, with a row of dots where others are left out.

    Args:
        rows: the numbers of those shown.
        cells: of a row.
        gap: columns that have dots.
    """
    for index, after in pairwise([*rows, count]):
        to.add_row(*map(plain, cells(index)))
        if after > index + 1:
            to.add_row(*[_GAP] * gap)


def shown_rows(count: int, also: Callable[[], Collection[int]] = tuple) -> list[int]:
    """All rows, or of very many the first and the last.

    Args:
        also: further ones that are then shown.
    """
    if count <= _MOST_ROWS:
        return list(range(count))
    return sorted({*range(_FIRST), *range(count - _LAST, count), *also()})
