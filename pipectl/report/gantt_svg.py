"""Timelines as an SVG picture, light or dark as the reader's screen is; no drawing library."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from html import escape
from typing import NamedTuple

from pipectl.report.gantt import COLOURS, FILLS, NAMES, recorded_ranks, spread_over
from pipectl.timeline import Event, Timeline
from pipectl.units import format_time

_NAMES = {kind: NAMES[kind] for kind in COLOURS} | {"update": "optimizer step"}
_STYLE = """\
text { fill: #24292f } .title { font-size: 14px; font-weight: 600 } .faint { fill: #57606a }
.page { fill: #ffffff } .idle { fill: #eaeef2 } .tick { stroke: #d0d7de }
.bar { fill: #1b1f24; text-anchor: middle }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .faint { fill: #9198a1 } .bar { fill: #0d1117 }
  .page { fill: #0d1117 } .idle { fill: #21262d } .tick { stroke: #3d444d }
}"""
_KINDS = "\n".join(f".{kind} {{ fill: {colour} }}" for kind, colour in COLOURS.items())
_LEFT, _RIGHT, _ROW_HEIGHT, _BAR_HEIGHT, _AXIS = 64, 24, 30, 24, 30
_LINE, _LEGEND_HEIGHT = 18, 30
_NAME_HEIGHT, _GAP = 22, 6  # above the rows of one timeline among several
_LETTER = 7  # width of a letter at most, in pixels
_TICKS = 10  # at most, about
_MAX_RANKS, _MAX_BARS = 64, 20_000  # a picture that a browser still shows at once


def gantt_svg(timeline: Timeline, title: str, *notes: str, width: int = 960) -> str:
    """The timeline as a self-contained SVG document; of very many ranks it shows some.

    Args:
        timeline: one optimizer step.
        title: shown above the picture and as its text alternative.
        notes: lines below the title.
        width: in pixels.
    """
    return gantts_svg({"": timeline}, title, *notes, width=width)


def gantts_svg(timelines: Mapping[str, Timeline], title: str, *notes: str, width: int = 960) -> str:
    """Timelines one above the other on one axis of time, otherwise as :func:`gantt_svg`.

    Args:
        timelines: by name, which stands above each with its length; none above one without a name.
        title: of all.
        notes: lines below the title.
        width: in pixels.
    """
    drawn = [event for each in timelines.values() for event in each.events if event.kind in FILLS]
    ranks = max(timeline.ranks for timeline in timelines.values())
    rows = _rows_of(timelines.values())
    if len(rows) < ranks:
        notes = (*notes, f"{len(rows)} of {ranks:,} ranks are shown")
    top = 28 + _LINE * len(notes) + _LEGEND_HEIGHT
    panels = [*_panels(timelines, len(rows), top)]
    bottom = panels[-1].top + len(rows) * _ROW_HEIGHT
    end_s = max(timeline.end_s for timeline in timelines.values())
    scale = (width - _LEFT - _RIGHT) / (end_s or 1.0)
    body = [
        *_heading(title, notes),
        *_legend({event.kind for event in drawn}, top - 18),
        *(line for panel in panels for line in _rows(panel, rows, scale, width)),
        *_axis(end_s, scale, panels[0].top, bottom),
        *(bar for panel in panels for bar in _bars(panel, rows, scale)),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + _AXIS}" '
        f'width="{width}" height="{bottom + _AXIS}" role="img" '
        'font-family="sans-serif" font-size="12">\n' + "\n".join(body) + "\n</svg>\n"
    )


class _Panel(NamedTuple):
    """A timeline, and where its first row begins."""

    name: str
    timeline: Timeline
    top: int


def _panels(timelines: Mapping[str, Timeline], rows: int, top: int) -> Iterator[_Panel]:
    for index, (name, timeline) in enumerate(timelines.items()):
        top += (_NAME_HEIGHT if name else 0) + (_GAP if index else 0)
        yield _Panel(name, timeline, top)
        top += rows * _ROW_HEIGHT


def _rows_of(timelines: Collection[Timeline]) -> dict[int, int]:
    """The row of every rank that is shown."""
    known = recorded_ranks(timelines)
    drawn = (event.rank for each in timelines for event in each.events if event.kind in FILLS)
    bars = sum(map(set(known).__contains__, drawn))
    affordable = _MAX_BARS * len(known) // max(1, bars)
    shown = spread_over(known, max(2, min(_MAX_RANKS, affordable)))
    return {rank: row for row, rank in enumerate(shown)}


def _heading(title: str, notes: tuple[str, ...]) -> Iterator[str]:
    yield f"<title>{escape(title)}</title>"
    yield f"<style>{_STYLE}\n{_KINDS}</style>"
    yield '<rect class="page" width="100%" height="100%"/>'
    yield f'<text class="title" x="8" y="20">{escape(title)}</text>'
    for index, note in enumerate(notes):
        yield f'<text class="faint" x="8" y="{20 + _LINE * (index + 1)}">{escape(note)}</text>'


def _legend(kinds: set[str], y: int) -> Iterator[str]:
    """The kinds that occur, then what the rest means."""
    x = _LEFT
    for kind, name in _NAMES.items():
        if kind in kinds:
            yield f'<rect class="{kind}" x="{x}" y="{y - 10}" width="12" height="12"/>'
            yield f'<text x="{x + 17}" y="{y}">{name}</text>'
            x += 17 + _LETTER * len(name) + 14
    yield f'<text class="faint" x="{x}" y="{y}">number: micro-batch; empty: waiting</text>'


def _rows(panel: _Panel, rows: Mapping[int, int], scale: float, width: int) -> Iterator[str]:
    """The name above, and empty rows, as long as the timeline."""
    end_s = panel.timeline.end_s
    if panel.name:
        words = escape(f"{panel.name}: {format_time(end_s)}")
        yield f'<text x="8" y="{panel.top - 8}">{words}</text>'
    wide = round(end_s * scale) or width - _LEFT - _RIGHT
    for rank, row in rows.items():
        y = panel.top + row * _ROW_HEIGHT
        yield f'<text x="8" y="{y + 16}">rank {rank}</text>'
        yield (f'<rect class="idle" x="{_LEFT}" y="{y}" width="{wide}" height="{_BAR_HEIGHT}"/>')


def _axis(end_s: float, scale: float, top: int, bottom: int) -> Iterator[str]:
    """Vertical lines at round times, and the end of the step."""
    interval_s = _round_interval(end_s / _TICKS)
    times_s = [interval_s * index for index in range(_TICKS * 2) if interval_s * index < end_s]
    room_s = 60 / scale  # so that no label runs into the last one
    for time_s in [*(time_s for time_s in times_s if time_s < end_s - room_s), end_s]:
        x = _LEFT + time_s * scale
        label = format_time(time_s) if time_s else "0"
        place = f'x="{x:.1f}" y="{bottom + 16}" text-anchor="middle"'
        yield f'<line class="tick" x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{bottom}"/>'
        yield f'<text class="faint" {place}>{label}</text>'


def _round_interval(time_s: float) -> float:
    """The next of 1, 2, 5, 10, 20… in its power of ten."""
    if time_s <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(time_s))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= time_s * 0.999)


def _bars(panel: _Panel, rows: Mapping[int, int], scale: float) -> Iterator[str]:
    for event in panel.timeline.events:
        if event.kind in FILLS and event.rank in rows:
            yield _bar(event, scale, panel.top + rows[event.rank] * _ROW_HEIGHT)


def _bar(event: Event, scale: float, y: int) -> str:
    x = _LEFT + event.start_s * scale
    wide = max(0.5, (event.end_s - event.start_s) * scale - 0.5)
    rect = (
        f'<rect class="{event.kind}" x="{x:.2f}" y="{y}" width="{wide:.2f}" '
        f'height="{_BAR_HEIGHT}"/>'
    )
    label = str(event.micro_batch) if event.micro_batch >= 0 else ""
    if not label or wide < 8 * len(label) + 2:
        return rect
    return rect + f'<text class="bar" x="{x + wide / 2:.2f}" y="{y + 16}">{label}</text>'
