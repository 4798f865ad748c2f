"""Measured links as an SVG picture, light or dark as the reader's screen is; no drawing library.

Two panels with logarithmic axes: bandwidth of single messages by size, and time of a sum over ranks
by size and number of ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from pipectl.cluster import Cluster
from pipectl.report.links_plot import bandwidth, measured_links, whole_bytes
from pipectl.units import format_time

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
_LEGEND = 150  # width of an entry
_ACROSS = 3  # entries in a row

Points = Sequence[tuple[float, float]]


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
    x = left + index % _ACROSS * _LEGEND
    y = 76 + index // _ACROSS * 14
    yield f'<line class="line {colour}" x1="{x}" y1="{y - 4}" x2="{x + 18}" y2="{y - 4}"/>'
    yield f'<text x="{x + 24}" y="{y}">{escape(name)}</text>'
