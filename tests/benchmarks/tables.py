"""Markdown tables, as all benchmarks print them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """The lines of a table."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print every line as soon as it is known."""
    for line in table(columns, rows):
        print(line, flush=True)
