"""Measured links: bandwidth by message size as text in plain ASCII, and an SVG picture.

All axes are logarithmic. The picture follows the reader's screen, light or dark, and has a second
panel: time of a sum over ranks by size and number of ranks. The text::

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

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.units import format_bytes, format_time

_MARKS = {"within a node": "w", "between nodes": "b"}
_BOTH = "*"
_TITLE = "bandwidth by message size"
_LINES = 10
_MAX_COLUMNS = 72
_GUTTER = 12
_ROUND_SIZES = (1, 2**10, 2**20, 2**30)
_STYLE = """\
text { fill: #24292f } .title { font-size: 14px; font-weight: 600 } .faint { fill: #57606a }
.page { fill: #ffffff } .tick { stroke: #d0d7de }
.line { fill: none; stroke-width: 2 }
.c0 { stroke: #2f7fb5 } .c1 { stroke: #cf6a26 } .c2 { stroke: #4f8f45 } .c3 { stroke: #8a5fb0 }
.c4 { stroke: #a08a1e } .c5 { stroke: #6e7781 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .faint { fill: #9198a1 } .page { fill: #0d1117 } .tick { stroke: #3d444d }
}"""
_COLOURS = 6
_WIDTH, _HEIGHT = 460, 280
_LEFT, _TOP, _BOTTOM = 84, 96, 36
_STEP = 84  # between panels
_ENTRY = 150  # width of an entry
_ACROSS = 3  # entries in a row

Points = Sequence[tuple[float, float]]


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
    columns = max(20, min(width, _MAX_COLUMNS) - _GUTTER - 2)
    largest = max(link.timings[-1][0] for link in links.values())
    sizes = [largest ** (column / (columns - 1)) for column in range(columns)]
    curves = {name: [bandwidth(link, size) for size in sizes] for name, link in links.items()}
    top, bottom = (f(v for curve in curves.values() for v in curve) for f in (max, min))
    rows = [[" "] * columns for _ in range(_LINES)]
    for name, curve in curves.items():
        for column, value in enumerate(curve):
            row = rows[_plot_row(value, bottom, top)]
            row[column] = _MARKS[name] if row[column] == " " else _BOTH
    return [
        _TITLE,
        *_plot_frame(rows, bottom, top),
        _plot_axis(largest, columns),
        _plot_legend(links),
    ]


def whole_bytes(size: float) -> str:
    """A size without superfluous digits: ``16 KiB``, ``9.54 MiB``."""
    return re.sub(r"\.0+ ", " ", format_bytes(size))


def _plot_row(value: float, bottom: float, top: float) -> int:
    share = math.log(value / bottom) / math.log(top / bottom) if top > bottom else 0.0
    return round((1 - share) * (_LINES - 1))


def _plot_frame(rows: list[list[str]], bottom: float, top: float) -> Iterator[str]:
    labels = {0: f"{format_bytes(top)}/s", _LINES - 1: f"{format_bytes(bottom)}/s"}
    for index, row in enumerate(rows):
        yield f"{labels.get(index, ''):>{_GUTTER}} |{''.join(row)}".rstrip()
    yield f"{'':>{_GUTTER}} +{'-' * len(rows[0])}"


def _plot_axis(largest: int, columns: int) -> str:
    """Round sizes under their columns."""
    line = " " * (_GUTTER + 2)
    for size in (size for size in _ROUND_SIZES if size <= largest):
        label = whole_bytes(size)
        column = round(math.log(size) / math.log(largest) * (columns - 1)) if largest > 1 else 0
        start = _GUTTER + 2 + min(column, columns - len(label))
        if start >= len(line):
            line = f"{line:<{start}}{label} "
    return line.rstrip()


def _plot_legend(links: Mapping[str, Link]) -> str:
    marks = [f"{_MARKS[name]} {name}" for name in links]
    both = [f"{_BOTH} both"] if len(links) > 1 else []
    return f"{'':>{_GUTTER}}  {', '.join(marks + both)}"


@dataclass(frozen=True)
class _Panel:
    """One chart; all coordinates are above 0, and ``base`` is the ratio of neighbouring labels."""

    title: str
    curves: Mapping[str, Points]
    label: Callable[[float], str]
    base: int

    @property
    def xs(self) -> list[float]:
        return [x for points in self.curves.values() for x, _ in points]

    @property
    def ys(self) -> list[float]:
        return [y for points in self.curves.values() for _, y in points]


def links_svg(cluster: Cluster) -> str:
    """The links as a self-contained SVG document."""
    panels = [panel for panel in (_bandwidths(cluster), _sums(cluster)) if panel.curves]
    width = max(1, len(panels)) * (_WIDTH + _STEP) + 24
    height = _TOP + _HEIGHT + _BOTTOM
    title = f"Links of {cluster.name}"
    body = [
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        f'<text class="title" x="8" y="20">{escape(title)}</text>',
        f'<text class="faint" x="8" y="38">{escape(cluster.source)}</text>',
    ]
    for index, panel in enumerate(panels):
        body += _draw(panel, _LEFT + index * (_WIDTH + _STEP))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" '
        'font-family="sans-serif" font-size="12">\n' + "\n".join(body) + "\n</svg>\n"
    )


def _bandwidths(cluster: Cluster) -> _Panel:
    curves = {
        name: [(float(size), bandwidth(link, size)) for size, _ in link.timings]
        for name, link in measured_links(cluster).items()
    }
    return _Panel("bandwidth by message size", curves, lambda y: f"{whole_bytes(y)}/s", 16)


def _sums(cluster: Cluster) -> _Panel:
    curves: dict[str, list[tuple[float, float]]] = {}
    for ranks, size, time_s in cluster.allreduce:
        curves.setdefault(f"{ranks} ranks", []).append((float(size), max(time_s, 1e-9)))
    return _Panel("time of a sum over ranks by size", curves, _whole_time, 10)


def _draw(panel: _Panel, left: int) -> Iterator[str]:
    low, high = min(panel.xs), max(panel.xs)
    bottom, top = _powers(panel.ys, panel.base)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + _share(x, low, high) * _WIDTH, _TOP + (1 - _share(y, bottom, top)) * _HEIGHT

    yield f'<text x="{left}" y="58">{panel.title}</text>'
    for x in (4.0**power for power in range(0, 32, 2)):
        if low <= x <= high:
            yield from _vertical(place(x, bottom)[0], whole_bytes(x))
    for power in range(round(math.log(top / bottom, panel.base)) + 1):
        y = bottom * panel.base**power
        yield from _horizontal(left, place(low, y)[1], panel.label(y))
    for index, (name, points) in enumerate(panel.curves.items()):
        yield from _curve([place(x, y) for x, y in points], index, name, left)


def _powers(values: Sequence[float], base: int) -> tuple[float, float]:
    """Powers of the base around the values."""
    low, high = math.floor(math.log(min(values), base)), math.ceil(math.log(max(values), base))
    return float(base) ** low, float(base) ** max(high, low + 1)


def _whole_time(time_s: float) -> str:
    return re.sub(r"\.0+ ", " ", format_time(time_s))


def _share(value: float, low: float, high: float) -> float:
    """Where a value lies between two others on a logarithmic axis, from 0 to 1."""
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def _vertical(x: float, label: str) -> Iterator[str]:
    bottom = _TOP + _HEIGHT
    yield f'<line class="tick" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>'
    yield f'<text class="faint" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>'


def _horizontal(left: int, y: float, label: str) -> Iterator[str]:
    yield f'<line class="tick" x1="{left}" y1="{y:.1f}" x2="{left + _WIDTH}" y2="{y:.1f}"/>'
    yield f'<text class="faint" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'


def _curve(points: Points, index: int, name: str, left: int) -> Iterator[str]:
    """A line with a point at every measured size, and its entry in the legend."""
    colour = f"c{index % _COLOURS}"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline class="line {colour}" points="{path}"/>'
    for x, y in points:
        yield f'<circle class="line {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>'
    x = left + index % _ACROSS * _ENTRY
    y = 76 + index // _ACROSS * 14
    yield f'<line class="line {colour}" x1="{x}" y1="{y - 4}" x2="{x + 18}" y2="{y - 4}"/>'
    yield f'<text x="{x + 24}" y="{y}">{escape(name)}</text>'
