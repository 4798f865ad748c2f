"""Measured links as an SVG picture with logarithmic axes.

One panel has the bandwidth by message size, another the time of a sum over ranks by size and number
of ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.report.svg import document, text, tick
from pipectl.units import format_bytes, format_time

_COLOURS = {
    "c0": "#2f7fb5", "c1": "#cf6a26", "c2": "#4f8f45", "c3": "#8a5fb0", "c4": "#a08a1e",
    "c5": "#6e7781",
}  # fmt: skip
_STYLE = ".line { fill: none; stroke-width: 2 } " + " ".join(
    f".{name} {{ stroke: {colour} }}" for name, colour in _COLOURS.items()
)
_WIDTH, _HEIGHT = 460, 280
_LEFT, _TOP, _BOTTOM = 84, 96, 36
_STEP = 84  # between panels
_ENTRY = 150  # width of an entry of the legend
_ACROSS = 3  # entries in a row

Points = Sequence[tuple[float, float]]


def measured_links(cluster: Cluster) -> dict[str, Link]:
    """The links whose messages were measured, by name."""
    named = {"within a node": cluster.within_node, "between nodes": cluster.between_nodes}
    return {name: link for name, link in named.items() if link.timings}


def bandwidth(link: Link, size: float) -> float:
    """Bytes per second of single messages."""
    return size / link.transfer_s(size)


def whole_bytes(size: float) -> str:
    """A size without superfluous digits: ``16 KiB``, ``9.54 MiB``."""
    return re.sub(r"\.0+ ", " ", format_bytes(size))


def links_svg(cluster: Cluster) -> str:
    """The links as a self-contained SVG document."""
    bandwidths: dict[str, Points] = {
        name: [(float(size), bandwidth(link, size)) for size, _ in link.timings]
        for name, link in measured_links(cluster).items()
    }
    sums: dict[str, list[tuple[float, float]]] = {}
    for ranks, size, time_s in cluster.allreduce:
        sums.setdefault(f"{ranks} ranks", []).append((float(size), max(time_s, 1e-9)))
    body: list[str] = []
    left = _LEFT

    def short_time(time_s: float) -> str:
        return re.sub(r"\.0+ ", " ", format_time(time_s))

    if bandwidths:
        title = "bandwidth by message size"
        body += _panel(title, bandwidths, left, 16, lambda value: f"{whole_bytes(value)}/s")
        left += _WIDTH + _STEP
    if sums:
        title = "time of a sum over ranks by size"
        body += _panel(title, sums, left, 10, short_time)
        left += _WIDTH + _STEP
    width = max(left, _LEFT + _WIDTH + _STEP) - _LEFT + 24
    title = f"Links of {cluster.name}"
    return document(title, [cluster.source], body, (width, _TOP + _HEIGHT + _BOTTOM), _STYLE)


def _panel(
    title: str,
    curves: Mapping[str, Points],
    left: int,
    base: int,
    label: Callable[[float], str],
) -> Iterator[str]:
    """One chart; all coordinates are above 0, and ``base`` is the ratio of neighbouring labels."""
    xs, ys = zip(*(point for points in curves.values() for point in points), strict=True)
    low, high = min(xs), max(xs)
    power = math.floor(math.log(min(ys), base))
    powers = range(power, max(math.ceil(math.log(max(ys), base)), power + 1) + 1)
    bottom, top = float(base) ** powers[0], float(base) ** powers[-1]
    end, right = _TOP + _HEIGHT, left + _WIDTH

    def place(x: float, y: float) -> tuple[float, float]:
        return left + _share(x, low, high) * _WIDTH, end - _share(y, bottom, top) * _HEIGHT

    yield text(left, 58, title)
    for size in (16.0**power for power in range(16)):
        if low <= size <= high:
            x = place(size, bottom)[0]
            yield tick(x, _TOP, x, end)
            yield text(round(x, 1), end + 18, whole_bytes(size), "faint", "middle")
    for value in (float(base) ** power for power in powers):
        y = place(low, value)[1]
        yield tick(left, y, right, y)
        yield text(left - 6, round(y + 4, 1), label(value), "faint", "end")
    for index, (name, points) in enumerate(curves.items()):
        kind = f'class="line c{index % len(_COLOURS)}"'
        places = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline {kind} points="{path}"/>'
        yield from (f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in places)
        x = left + index % _ACROSS * _ENTRY
        y = 76 + index // _ACROSS * 14
        yield f'<line {kind} x1="{x}" y1="{y - 4}" x2="{x + 18}" y2="{y - 4}"/>'
        yield text(x + 24, y, name)


def _share(value: float, low: float, high: float) -> float:
    """Where a value lies between two others on a logarithmic axis, from 0 to 1."""
    return math.log(value / low) / math.log(high / low) if high > low else 0.5
