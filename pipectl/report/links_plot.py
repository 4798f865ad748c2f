"""Bandwidth by message size as text, readable without colour and in plain ASCII.

Both axes are logarithmic::

    bandwidth by message size
    3.30 GiB/s |                    www
               |               wwwww   bbb
               |          wwwww  bbbbbb
               |     wwwww bbbbbb
    1.02 MiB/s |wwwwwbbbbbb
               +-----------------------
                1 B     1 KiB   1 MiB
                w within a node, b between nodes
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import log

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.units import format_bytes

_MARKS = {"within a node": "w", "between nodes": "b"}
_BOTH = "*"
_TITLE = "bandwidth by message size"
_HEIGHT = 10
_WIDEST = 72
_GUTTER = 12
_ROUND_SIZES = (1, 2**10, 2**20, 2**30)


def measured_links(cluster: Cluster) -> dict[str, Link]:
    """The links whose messages were measured, by name."""
    named = {"within a node": cluster.within_node, "between nodes": cluster.between_nodes}
    return {name: link for name, link in named.items() if link.timings}


def bandwidth(link: Link, size: float) -> float:
    """Bytes per second of single messages."""
    return size / link.transfer_s(size)


def bandwidth_plot(links: Mapping[str, Link], width: int) -> list[str]:
    """Title, plot and legend; nothing without links.

    Args:
        links: with timings, by name.
        width: columns there are.
    """
    if not links:
        return []
    columns = max(20, min(width, _WIDEST) - _GUTTER - 2)
    largest = max(link.timings[-1][0] for link in links.values())
    sizes = [largest ** (column / (columns - 1)) for column in range(columns)]
    curves = {name: [bandwidth(link, size) for size in sizes] for name, link in links.items()}
    top, bottom = (f(v for curve in curves.values() for v in curve) for f in (max, min))
    rows = [[" "] * columns for _ in range(_HEIGHT)]
    for name, curve in curves.items():
        for column, value in enumerate(curve):
            row = rows[_row(value, bottom, top)]
            row[column] = _MARKS[name] if row[column] == " " else _BOTH
    return [_TITLE, *_framed(rows, bottom, top), _axis(largest, columns), _legend(links)]


def whole_bytes(size: float) -> str:
    """A size without superfluous digits: ``16 KiB``, ``9.54 MiB``."""
    return re.sub(r"\.0+ ", " ", format_bytes(size))


def _row(value: float, bottom: float, top: float) -> int:
    share = log(value / bottom) / log(top / bottom) if top > bottom else 0.0
    return round((1 - share) * (_HEIGHT - 1))


def _framed(rows: list[list[str]], bottom: float, top: float) -> Iterator[str]:
    labels = {0: f"{format_bytes(top)}/s", _HEIGHT - 1: f"{format_bytes(bottom)}/s"}
    for index, row in enumerate(rows):
        yield f"{labels.get(index, ''):>{_GUTTER}} |{''.join(row)}".rstrip()
    yield f"{'':>{_GUTTER}} +{'-' * len(rows[0])}"


def _axis(largest: int, columns: int) -> str:
    """Round sizes under their columns."""
    line = " " * (_GUTTER + 2)
    for size in (size for size in _ROUND_SIZES if size <= largest):
        label = whole_bytes(size)
        column = round(log(size) / log(largest) * (columns - 1)) if largest > 1 else 0
        start = _GUTTER + 2 + min(column, columns - len(label))
        if start >= len(line):
            line = f"{line:<{start}}{label} "
    return line.rstrip()


def _legend(links: Mapping[str, Link]) -> str:
    marks = [f"{_MARKS[name]} {name}" for name in links]
    both = [f"{_BOTH} both"] if len(links) > 1 else []
    return f"{'':>{_GUTTER}}  {', '.join(marks + both)}"
