"""Figures by step as a curve in SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

Point = tuple[float, float]
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 520, 200, 64, 24, 12
_MOST = 1000
_STYLE = "fill:none;stroke:#2f81f7;stroke-width:1.5"


def curve(title: str, points: Sequence[Point]) -> str:
    """A curve with its least and largest figures at the axes; nothing without points.

    Args:
        points: steps, ascending, and figures; of very many, means of neighbours are drawn.
    """
    if not points:
        return ""
    drawn = thinned(points, _MOST)
    xs, ys = [x for x, _ in drawn], [y for _, y in drawn]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    wide, high = _WIDTH - _LEFT - 8, _HEIGHT - _BOTTOM - _TOP
    places = (
        (_LEFT + wide * _share(x, x0, x1), _TOP + high * (1 - _share(y, y0, y1))) for x, y in drawn
    )
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img">'
        f"<title>{escape(title)}</title>{''.join(_axes(title, (x0, x1), (y0, y1)))}"
        f'<polyline points="{line}" style="{_STYLE}"/></svg>'
    )


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """As many points at most, each the mean of neighbours."""
    count = min(len(points), most)
    bounds = [index * len(points) // count for index in range(count + 1)]
    return [_mean(points[a:b]) for a, b in pairwise(bounds)]


def _mean(points: Sequence[Point]) -> Point:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _axes(title: str, xs: Point, ys: Point) -> Iterator[str]:
    bottom = _HEIGHT - _BOTTOM
    yield f'<text x="{_LEFT + 8}" y="{_TOP + 4}">{escape(title)}</text>'
    yield f'<text x="{_LEFT - 6}" y="{_TOP + 8}" text-anchor="end">{ys[1]:.4g}</text>'
    yield f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">{ys[0]:.4g}</text>'
    yield f'<text x="{_LEFT}" y="{_HEIGHT - 6}">step {xs[0]:.0f}</text>'
    yield f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 6}" text-anchor="end">{xs[1]:.0f}</text>'
    path = f"M{_LEFT} {_TOP}V{bottom}H{_WIDTH - 8}"
    yield f'<path d="{path}" style="fill:none;stroke:var(--line)"/>'
