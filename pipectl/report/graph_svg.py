"""The operators of a model, coloured by stage, from left to right in the order of their values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from pipectl.profile import Profile

COLOURS = (
    "#7fb3d5", "#e59866", "#82b366", "#c9a9dc", "#e3c567", "#76c7c0", "#d98880", "#aab7b8",
)  # fmt: skip
_COLUMN, _ROW, _SIZE, _EDGE = 14, 12, 9, 16
_NONE = "#8884"
_MOST_EDGES = 20_000


def graph_svg(profile: Profile, stages: Sequence[Sequence[str]]) -> str:
    """Boxes for operators, with their names and stages when pointed at; lines for values.

    Args:
        stages: ids of the operators of each.
    """
    stage_of = {node: index for index, nodes in enumerate(stages) for node in nodes}
    places = _places(profile)
    width = _EDGE * 2 + _COLUMN * (1 + max((x for x, _ in places.values()), default=0))
    height = _EDGE * 2 + _ROW * (1 + max((y for _, y in places.values()), default=0))
    parts = [*_edges(profile, places), *_boxes(profile, places, stage_of)]
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
        f"<title>{escape(profile.name)}: {len(profile.operators)} operators</title>"
        f"{''.join(parts)}</svg>"
    )


def colour(stage: int) -> str:
    """Of a stage; they come round again."""
    return COLOURS[stage % len(COLOURS)]


def _places(profile: Profile) -> dict[str, tuple[int, int]]:
    """Column and row: one column behind the last value that an operator reads."""
    column: dict[str, int] = {operator.id: 0 for operator in profile.operators}
    reads: dict[str, list[str]] = {operator.id: [] for operator in profile.operators}
    for source, target in profile.edges:
        reads[target].append(source)
    rows: dict[int, int] = {}
    found = {}
    for operator in profile.operators:
        own = max((column[source] + 1 for source in reads[operator.id]), default=0)
        column[operator.id] = own
        found[operator.id] = own, rows.get(own, 0)
        rows[own] = rows.get(own, 0) + 1
    return found


def _middle(place: tuple[int, int]) -> tuple[float, float]:
    return _EDGE + place[0] * _COLUMN + _SIZE / 2, _EDGE + place[1] * _ROW + _SIZE / 2


def _edges(profile: Profile, places: dict[str, tuple[int, int]]) -> Iterator[str]:
    lines = []
    for source, target in profile.edges[:_MOST_EDGES]:
        (x0, y0), (x1, y1) = _middle(places[source]), _middle(places[target])
        bend = 0 if y0 != y1 or x1 - x0 <= _COLUMN else -_ROW / 2
        middle = (x0 + x1) / 2
        lines.append(
            f"M{x0:g} {y0:g}C{middle:g} {y0 + bend:g} {middle:g} {y1 + bend:g} {x1:g} {y1:g}"
        )
    yield f'<path d="{"".join(lines)}" style="fill:none;stroke:var(--line)"/>'


def _boxes(
    profile: Profile, places: dict[str, tuple[int, int]], stage_of: dict[str, int]
) -> Iterator[str]:
    for operator in profile.operators:
        x, y = _middle(places[operator.id])
        stage = stage_of.get(operator.id)
        fill = _NONE if stage is None else colour(stage)
        where = "" if stage is None else f", stage {stage}"
        yield (
            f'<rect x="{x - _SIZE / 2:g}" y="{y - _SIZE / 2:g}" width="{_SIZE}" height="{_SIZE}" '
            f'fill="{fill}"><title>{escape(operator.name)}{where}</title></rect>'
        )
