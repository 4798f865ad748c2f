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
            row = rows[round((1 - _share(value, bottom, top, 0.0)) * (_LINES - 1))]
            row[column] = _MARKS[name] if row[column] == " " else _BOTH
    labels = [f"{format_bytes(top)}/s", *[""] * (_LINES - 2), f"{format_bytes(bottom)}/s"]
    lines = [
        f"{label:>{_GUTTER}} |{''.join(row)}".rstrip()
        for label, row in zip(labels, rows, strict=True)
    ]
    axis = " " * (_GUTTER + 2)
    for size in (size for size in _ROUND_SIZES if size <= largest):  # under their columns
        column = round(math.log(size) / math.log(largest) * (columns - 1)) if largest > 1 else 0
        start = _GUTTER + 2 + min(column, columns - len(whole_bytes(size)))
        if start >= len(axis):
            axis = f"{axis:<{start}}{whole_bytes(size)} "
    marks = [f"{_MARKS[name]} {name}" for name in links]
    legend = ", ".join([*marks, f"{_BOTH} both"] if len(links) > 1 else marks)
    frame = f"{'':>{_GUTTER}} +{'-' * columns}"
    return [_TITLE, *lines, frame, axis.rstrip(), f"{'':>{_GUTTER}}  {legend}"]


def whole_bytes(size: float) -> str:
    """A size without superfluous digits: ``16 KiB``, ``9.54 MiB``."""
    return re.sub(r"\.0+ ", " ", format_bytes(size))


@dataclass(frozen=True)
class _Panel:
    """One chart; all coordinates are above 0, and ``base`` is the ratio of neighbouring labels."""

    title: str
    curves: Mapping[str, Points]
    label: Callable[[float], str]
    base: int


def links_svg(cluster: Cluster) -> str:
    """The links as a self-contained SVG document."""
    bandwidths: dict[str, Points] = {
        name: [(float(size), bandwidth(link, size)) for size, _ in link.timings]
        for name, link in measured_links(cluster).items()
    }
    sums: dict[str, list[tuple[float, float]]] = {}
    for ranks, size, time_s in cluster.allreduce:
        sums.setdefault(f"{ranks} ranks", []).append((float(size), max(time_s, 1e-9)))
    both = (
        _Panel(_TITLE, bandwidths, lambda y: f"{whole_bytes(y)}/s", 16),
        _Panel(
            "time of a sum over ranks by size",
            sums,
            lambda y: re.sub(r"\.0+ ", " ", format_time(y)),
            10,
        ),
    )
    panels = [panel for panel in both if panel.curves]
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


def _draw(panel: _Panel, left: int) -> Iterator[str]:
    xs, ys = zip(*(point for points in panel.curves.values() for point in points), strict=True)
    low, high, base = min(xs), max(xs), panel.base
    power = math.floor(math.log(min(ys), base))
    powers = range(power, max(math.ceil(math.log(max(ys), base)), power + 1) + 1)
    bottom, top = float(base) ** powers[0], float(base) ** powers[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        share = 1 - _share(y, bottom, top)
        return left + _share(x, low, high) * _WIDTH, _TOP + share * _HEIGHT

    yield f'<text x="{left}" y="58">{panel.title}</text>'
    end, right = _TOP + _HEIGHT, left + _WIDTH
    for size in (4.0**power for power in range(0, 32, 2)):
        if low <= size <= high:
            x, label = place(size, bottom)[0], whole_bytes(size)
            yield f'<line class="tick" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{end}"/>'
            middle = f'x="{x:.1f}" y="{end + 18}" text-anchor="middle"'
            yield f'<text class="faint" {middle}>{label}</text>'
    for value in (float(base) ** power for power in powers):
        y = place(low, value)[1]
        yield f'<line class="tick" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        beside = f'x="{left - 6}" y="{y + 4:.1f}" text-anchor="end"'
        yield f'<text class="faint" {beside}>{panel.label(value)}</text>'
    for index, (name, points) in enumerate(panel.curves.items()):
        yield from _curve([place(x, y) for x, y in points], index, name, left)


def _share(value: float, low: float, high: float, alone: float = 0.5) -> float:
    """Where a value lies between two others on a logarithmic axis, from 0 to 1."""
    return math.log(value / low) / math.log(high / low) if high > low else alone


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
