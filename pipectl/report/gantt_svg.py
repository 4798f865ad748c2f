"""A timeline as an SVG picture, without any drawing library."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from pipectl.report.gantt import FILLS
from pipectl.timeline import Event, Timeline
from pipectl.units import format_time

_COLOURS = {
    "forward": "#7fb3d5",
    "backward": "#e59866",
    "backward_input": "#e59866",
    "backward_weight": "#d7bde2",
    "update": "#82b366",
    "evaluate": "#aab7b8",
}
_NAMES = {"forward": "forward", "backward": "backward", "update": "optimizer step"}
_LABEL_WIDTH, _ROW_HEIGHT, _BAR_HEIGHT, _TOP, _BOTTOM = 64, 30, 24, 48, 30


def gantt_svg(timeline: Timeline, title: str, *, width: int = 960) -> str:
    """The timeline as a self-contained SVG document.

    Args:
        timeline: one optimizer step.
        title: shown above the picture and as its text alternative.
        width: in pixels.
    """
    height = _TOP + timeline.ranks * _ROW_HEIGHT + _BOTTOM
    scale = (width - _LABEL_WIDTH - 12) / (timeline.end_s or 1.0)
    body = [
        *_header(title, width),
        *_rows(timeline, width),
        *(_bar(event, scale) for event in timeline.events if event.kind in FILLS),
        *_axis(timeline, width, height),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="sans-serif" font-size="12">\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _header(title: str, width: int) -> Iterator[str]:
    yield f"<title>{escape(title)}</title>"
    yield f'<rect width="{width}" height="100%" fill="#ffffff"/>'
    yield f'<text x="8" y="18" font-size="14" fill="#222">{escape(title)}</text>'
    for index, (kind, name) in enumerate(_NAMES.items()):
        x = _LABEL_WIDTH + index * 120
        yield f'<rect x="{x}" y="27" width="12" height="12" fill="{_COLOURS[kind]}"/>'
        yield f'<text x="{x + 17}" y="37" fill="#222">{name}</text>'


def _rows(timeline: Timeline, width: int) -> Iterator[str]:
    for rank in range(timeline.ranks):
        y = _TOP + rank * _ROW_HEIGHT
        yield f'<text x="8" y="{y + 16}" fill="#222">rank {rank}</text>'
        yield (
            f'<rect x="{_LABEL_WIDTH}" y="{y}" width="{width - _LABEL_WIDTH - 12}" '
            f'height="{_BAR_HEIGHT}" fill="#f2f3f4"/>'
        )


def _bar(event: Event, scale: float) -> str:
    x = _LABEL_WIDTH + event.start_s * scale
    y = _TOP + event.rank * _ROW_HEIGHT
    wide = max(0.5, (event.end_s - event.start_s) * scale)
    rect = (
        f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_BAR_HEIGHT}" '
        f'fill="{_COLOURS[event.kind]}" stroke="#ffffff" stroke-width="0.5"/>'
    )
    label = str(event.micro_batch) if event.micro_batch >= 0 else ""
    if not label or wide < 8 * len(label) + 2:
        return rect
    middle = x + wide / 2
    return rect + f'<text x="{middle:.2f}" y="{y + 16}" text-anchor="middle">{label}</text>'


def _axis(timeline: Timeline, width: int, height: int) -> Iterator[str]:
    y = height - 10
    yield f'<text x="{_LABEL_WIDTH}" y="{y}" fill="#222">0</text>'
    end = format_time(timeline.end_s)
    yield f'<text x="{width - 12}" y="{y}" text-anchor="end" fill="#222">{end}</text>'
