"""SVG charts of figures by step, and of measured links by message size."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.report import render
from pipectl.units import format_bytes, format_time, plural

if TYPE_CHECKING:
    from pipectl.runs import MetricsLine

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT = 440, 220
_LEFT, _GAP = 76, 100
_ENTRY, _LETTER = 110, 7
"""Smallest width of an entry of the legend, and that of a letter, in pixels."""
_COLOURS = ("#2f7fb5", "#cf6a26", "#4f8f45", "#8a5fb0", "#a08a1e", "#6e7781")
_MAX_POINTS = 1000
_OUTLIER = 5
"""Distance from the range of most values, relative to this range, from which on one is far."""
_FIGURES = "samples_per_s", "tokens_per_s", "learning_rate", "gradient_norm", "loss_scale"
"""What is drawn of steps besides their losses."""
_MAX_DOTS = 30
"""Curves with at most this many points show them as dots."""


class Axis(NamedTuple):
    """An axis from ``first`` at pixel 0 to ``last``.

    Args:
        ticks: labels by value.
        scale: logarithm or identity; the identity is halved so that no difference overflows.
    """

    pixels: int
    first: float
    last: float
    ticks: Mapping[float, str]
    scale: Callable[[float], float] = (0.5).__mul__

    def place(self, value: float) -> float:
        """Return the pixel of a value."""
        first, last = self.scale(self.first), self.scale(self.last)
        share = (self.scale(value) - first) / (last - first) if last != first else 0.5
        return round(self.pixels * share, 1)


class Chart(NamedTuple):
    """Curves by name, over two axes."""

    title: str
    curves: Mapping[str, Points]
    x: Axis
    y: Axis
    x_name: str = ""


def linear_ticks(low: float, high: float, max_ticks: int = 10) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of 10 between two values."""
    span = high - low
    if not 1e-300 < span < math.inf:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / max_ticks))
    steps = (power * factor for factor in (1, 2, 5, 10))
    step = next(step for step in steps if step >= span / max_ticks * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def average_points(points: Points, max_points: int) -> list[tuple[float, float]]:
    """Return at most so many points: means of neighbours if there are more."""
    count = min(len(points), max_points)
    bounds = [index * len(points) // count for index in range(count + 1)]
    groups = (points[start:stop] for start, stop in pairwise(bounds))
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]


def chart_svgs(figures: Mapping[str, Mapping[str, Points]]) -> list[str]:
    """Draw a picture per figure that has points.

    Points far from all others are drawn at the border, so that they do not flatten the curves.

    Args:
        figures: curves by name, by title; each a list of (step, value) with ascending steps.
    """
    return [
        _charts_svg([chart], "")
        for title, named in figures.items()
        if (chart := _chart_by_step(title, named)) is not None
    ]


def _chart_by_step(title: str, named: Mapping[str, Points]) -> Chart | None:
    """Make a chart of the curves that have points; None if there is none."""
    curves = {name: average_points(each, _MAX_POINTS) for name, each in named.items() if each}
    if not curves:
        return None
    xs, ys = zip(*(point for points in curves.values() for point in points), strict=True)
    low, high = _range_without_outliers(ys)
    steps = {x: f"{x:.0f}" for x in linear_ticks(min(xs), max(xs), 8) if x == int(x)}
    values = {y: f"{y:g}" for y in linear_ticks(low, high, 6)}
    x, y = Axis(_WIDTH, min(xs), max(xs), steps), Axis(_HEIGHT, high, low, values)
    shown = {
        name: [(step, min(max(value, low), high)) for step, value in points]
        for name, points in curves.items()
    }
    if outliers := sum(not low <= value <= high for value in ys):
        title = f"{title} (at the border: {plural(outliers, 'point')} beyond it)"
    if len(named) == 1:  # it needs no name
        shown = {"": next(iter(shown.values()))}
    return Chart(title, shown, x, y, "step")


def training_svgs(lines: Sequence[MetricsLine]) -> list[str]:
    """Draw every figure of a run by step, one picture each: loss, metrics, speed, rate, ..."""
    metrics = dict.fromkeys(name for line in lines for name in line.evaluation or {})
    evaluated: dict[str, list[tuple[float, float]]] = {
        name: [
            (line.step, value)
            for line in lines
            if line.evaluation and (value := line.evaluation.get(name)) is not None
        ]
        for name in metrics
    }
    losses: dict[str, Points] = {}
    losses["training"] = [(line.step, line.loss) for line in lines if line.loss is not None]
    if points := evaluated.pop("loss", []):
        losses["evaluation"] = points
    figures: dict[str, Mapping[str, Points]] = {
        "loss": losses,
        **{titled(f"evaluation.{name}"): {"": points} for name, points in evaluated.items()},
    }
    for name in _FIGURES:
        values = ((line.step, getattr(line, name)) for line in lines)
        figures[titled(name)] = {"": [(step, value) for step, value in values if value is not None]}
    return chart_svgs(figures)


def titled(figure: str) -> str:
    """The title of a figure of ``metrics.jsonl``, which is called as :func:`read_columns` does."""
    if figure.startswith("evaluation."):
        return f"{figure.removeprefix('evaluation.')} (evaluation)"
    return figure.replace("_per_s", "/s").replace("_", " ")


def _range_without_outliers(values: Sequence[float]) -> tuple[float, float]:
    """The range of values, without those far from the range of the middle 90 %."""
    ranked = sorted(values)
    last = len(ranked) - 1
    low, high = ranked[math.ceil(0.05 * last)], ranked[math.floor(0.95 * last)]
    margin = _OUTLIER * (high - low) if high > low else math.inf
    return max(ranked[0], low - margin), min(ranked[-1], high + margin)


def list_measured_links(cluster: Cluster) -> dict[str, Link]:
    """Return the links with measured messages, by name."""
    named = {"within a node": cluster.within_node, "between nodes": cluster.between_nodes}
    return {name: link for name, link in named.items() if link.timings}


def bandwidth(link: Link, size: float) -> float:
    """Return the bytes per second of single messages of a size."""
    return size / link.transfer_s(size)


def format_size(size: float) -> str:
    """Format a size without trailing zeros: ``16 KiB``, ``9.54 MiB``."""
    return _without_zeros(format_bytes(size))


def links_svg(cluster: Cluster) -> str:
    """Draw the bandwidth by message size, and the time of sums by size and number of ranks."""
    bandwidths = {
        name: [(float(size), bandwidth(link, size)) for size, _ in link.timings]
        for name, link in list_measured_links(cluster).items()
    }
    sums = defaultdict(list)
    for ranks, size, time_s in cluster.allreduce:
        sums[f"{ranks} ranks"].append((float(size), max(time_s, 1e-9)))
    charts = []
    if bandwidths:
        title = "bandwidth by message size"
        charts += [_chart_by_size(title, bandwidths, 16, lambda rate: f"{format_bytes(rate)}/s")]
    if sums:
        charts += [_chart_by_size("time of a sum over ranks by size", sums, 10, format_time)]
    return _charts_svg(charts, f"Links of {cluster.name}", cluster.source)


def _chart_by_size(
    title: str, curves: Mapping[str, Points], base: int, label: Callable[[float], str]
) -> Chart:
    """Make a chart by size (above 0); the second axis has a label per power of ``base``."""
    xs, ys = zip(*(point for points in curves.values() for point in points), strict=True)
    sizes = [size for size in (16.0**power for power in range(16)) if min(xs) <= size <= max(xs)]
    x = Axis(_WIDTH, min(xs), max(xs), {size: format_size(size) for size in sizes}, math.log)
    lowest = math.floor(math.log(min(ys), base))
    highest = max(math.ceil(math.log(max(ys), base)), lowest + 1)
    values = [float(base) ** power for power in range(lowest, highest + 1)]
    labels = {value: _without_zeros(label(value)) for value in values}
    return Chart(title, curves, x, Axis(_HEIGHT, values[-1], values[0], labels, math.log))


def _charts_svg(charts: Sequence[Chart], title: str, *notes: str) -> str:
    """Draw charts side by side as an SVG document."""
    top = (56 if title else 26) + 18 * len(notes)
    entries = max((len(chart.curves) for chart in charts), default=0)
    longest = max((len(name) for chart in charts for name in chart.curves), default=0)
    per_row = max(1, _WIDTH // max(_ENTRY, 40 + _LETTER * longest))
    return render(
        "charts.svg.j2",
        title=title,
        notes=notes,
        width=_LEFT + max(1, len(charts)) * (_WIDTH + _GAP) - _GAP + 24,
        height=top + _HEIGHT + 30 + 16 * math.ceil(entries / per_row),
        colours=_COLOURS,
        charts=charts,
        per_row=per_row,
        entry=_WIDTH // per_row,
        place={"left": _LEFT, "top": top, "width": _WIDTH, "height": _HEIGHT, "gap": _GAP},
        max_dots=_MAX_DOTS,
    )


def _without_zeros(text: str) -> str:
    return re.sub(r"\.0+ ", " ", text)
