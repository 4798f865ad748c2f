"""Tables as all commands print them."""

from __future__ import annotations

from collections.abc import Collection

from rich.table import Table


def table(*heads: str, left: Collection[str] = (), no_wrap: bool = True) -> Table:
    """An empty table.

    Args:
        heads: of the columns.
        left: the columns of words; figures stand on the right.
    """
    rows = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        rows.add_column(head, justify="left" if head in left else "right", no_wrap=no_wrap)
    return rows
