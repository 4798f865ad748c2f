"""Gantt charts of timelines, as text and as SVG.

Two stages and two micro-batches, 40 columns wide::

    rank 0 0░░░░░1░░░░░          0███████1███████UU
    rank 1       0░░░░░0███████1░░░░░1███████UU

``░`` is forward, ``█`` backward, ``U`` the optimizer step, and a blank is idle. Digits at the start
of a block are its micro-batch, if they fit. If there are too many blocks for the columns, the
characters occur in proportion to the time. :func:`legend` explains the other characters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pipectl.report import render
from pipectl.report.charts import linear_ticks
from pipectl.timeline import Event, Timeline, shown_ranks


class Style(NamedTuple):
    """The look of actions of a kind.

    Args:
        fill, style: character and colour in a terminal.
        colour: in pictures.
        name: in legends.
    """

    fill: str
    style: str
    colour: str
    name: str


LOOKS = {
    "forward": Style("░", "cyan", "#7fb3d5", "forward"),
    "recompute": Style("▒", "blue", "#b6d3e6", "forward again"),
    "backward": Style("█", "magenta", "#e59866", "backward"),
    "backward_input": Style("█", "magenta", "#e59866", "backward (inputs)"),
    "backward_weight": Style("▓", "blue", "#c9a9dc", "backward (weights)"),
    "reduce_wait": Style("R", "yellow", "#e3c567", "sum of gradients"),
    "update": Style("U", "green", "#82b366", "optimizer step"),
    "evaluate": Style("E", "cyan", "#aab7b8", "evaluation"),
}
"""Looks by kind of action; other kinds are not drawn."""
_MAX_TEXT_ROWS = 32
_MIN_COLUMNS = 2
"""Minimum mean width of blocks; below it, small blocks would displace others."""
_MAX_ROWS, _MAX_BARS = 64, 20_000
"""Limits for browsers."""
_LEFT, _WIDTH, _RIGHT = 64, 872, 24
_LINE_HEIGHT, _ROW_HEIGHT, _NAME_HEIGHT, _AXIS_HEIGHT = 18, 30, 22, 24
_LETTER_WIDTH, _LABEL_WIDTH = 7, 55


Segment = tuple[str, str]
"""Adjacent characters of one kind, and their colour in a terminal."""


def _rows(timelines: Iterable[Timeline], max_rows: int) -> list[int]:
    """Return the ranks to draw, of those with events in all timelines, or of all if none has."""
    timelines = list(timelines)
    recorded = [{event.rank for event in timeline.events} for timeline in timelines]
    ranks = sorted(set.intersection(*recorded)) or range(max(each.ranks for each in timelines))
    return [ranks[place] for place in shown_ranks(len(ranks), max_rows)]


def _bars(timeline: Timeline, ranks: Iterable[int]) -> dict[int, list[Event]]:
    """Return the events to draw per rank, by start time."""
    rows: dict[int, list[Event]] = {rank: [] for rank in ranks}
    for event in sorted(timeline.events, key=lambda event: event.start_s):
        if event.rank in rows and event.kind in LOOKS:
            rows[event.rank].append(event)
    return rows


def legend(timeline: Timeline) -> str:
    """Explain the characters that occur, and whether ranks are left out."""
    kinds = {event.kind for event in timeline.events}
    marks = "  ".join(f"{look.fill} {look.name}" for kind, look in LOOKS.items() if kind in kinds)
    shown = len(_rows([timeline], _MAX_TEXT_ROWS))
    some = f", {shown} of {timeline.ranks:,} ranks are shown" if shown < timeline.ranks else ""
    return f"{marks}  (digits: micro-batch, blank: idle{some})"


def gantt(timeline: Timeline, width: int) -> list[list[Segment]]:
    """Draw a timeline as rows of text with labels; of very many ranks, an even selection.

    Args:
        timeline: one optimizer step.
        width: columns, including labels.
    """
    end_s = timeline.end_s
    if end_s <= 0:
        return []
    digits = len(str(timeline.ranks - 1))
    columns = max(10, width - len("rank ") - digits - 1)
    rows = []
    for rank, events in _bars(timeline, _rows([timeline], _MAX_TEXT_ROWS)).items():
        draw = _textures if len(events) * _MIN_COLUMNS > columns else _blocks
        rows.append([(f"rank {rank:>{digits}} ", ""), *draw(events, columns, end_s)])
    return rows


def _textures(events: Sequence[Event], columns: int, end_s: float) -> Iterator[Segment]:
    """Show one kind per column, each in proportion to its time.

    The share of a kind that a column does not show is carried to the next column.
    """
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for event in events:
        start, stop = event.start_s / end_s * columns, event.end_s / end_s * columns
        for column in range(int(start), min(columns, math.ceil(stop))):
            share = min(stop, column + 1) - max(start, column)
            shares[column][event.kind] = shares[column].get(event.kind, 0.0) + share
    owed: dict[str, float] = {}
    for spent in shares:
        spent[""] = max(0.0, 1.0 - sum(spent.values()))
        for kind, share in spent.items():
            owed[kind] = owed.get(kind, 0.0) + share
        kind = max(spent, key=lambda each: owed[each])
        owed[kind] -= 1.0
        yield LOOKS[kind][:2] if kind in LOOKS else (" ", "")


def _blocks(events: Sequence[Event], columns: int, end_s: float) -> Iterator[Segment]:
    """Show blocks and gaps from left to right, at least a column per event while there is room.

    A block shows its micro-batch if a column for the kind remains.
    """
    column = 0
    for event in events:
        start = max(column, round(event.start_s / end_s * columns))
        stop = min(columns, max(start + 1, round(event.end_s / end_s * columns)))
        if start >= stop:
            continue
        if start > column:
            yield " " * (start - column), ""
        look, label = LOOKS[event.kind], str(event.micro_batch) if event.micro_batch >= 0 else ""
        label = label if len(label) < stop - start else ""
        yield label + look.fill * (stop - start - len(label)), look.style
        column = stop
    if column < columns:
        yield " " * (columns - column), ""


def gantt_svg(timelines: Timeline | Mapping[str, Timeline], title: str, *notes: str) -> str:
    """Draw timelines as an SVG document; of very many ranks, a selection.

    Args:
        timelines: one step, or several by name, one below the other on the same time axis.
        title: title of the picture; empty within a page.
        notes: lines below the title.
    """
    if isinstance(timelines, Timeline):
        timelines = {"": timelines}
    every = list(timelines.values())
    count, end_s = (max(getattr(each, name) for each in every) for name in ("ranks", "end_s"))
    ranks = _rows(every, count)
    bars = sum(len(row) for each in every for row in _bars(each, ranks).values())
    ranks = _rows(every, max(2, min(_MAX_ROWS, _MAX_BARS * len(ranks) // max(1, bars))))
    if len(ranks) < count:
        notes = (*notes, f"{len(ranks)} of {count:,} ranks are shown")
    scale = _WIDTH / (end_s or 1.0)
    panels, height = [], 0
    for name, timeline in timelines.items():
        height += _NAME_HEIGHT if name else 0
        rows = [
            (height + row * _ROW_HEIGHT, rank, events)
            for row, (rank, events) in enumerate(_bars(timeline, ranks).items())
        ]
        panels.append((height, name, round(timeline.end_s * scale, 1) or _WIDTH, rows))
        height += len(ranks) * _ROW_HEIGHT
    kinds = {event.kind for timeline in every for event in timeline.events}
    legend, x = [], _LEFT
    for kind, look in LOOKS.items():
        if kind in kinds:
            legend.append((kind, x, look.name))
            x += 17 + _LETTER_WIDTH * len(look.name) + 14
    last_s = end_s * (1 - 2 * _LABEL_WIDTH / _WIDTH)
    ticks = [time_s for time_s in linear_ticks(0.0, end_s) if time_s < last_s]
    top = (28 if title else 10) + (_LINE_HEIGHT * len(notes) + 8 if notes else 0)
    return render(
        "gantt.svg.j2",
        title=title,
        notes=notes,
        width=_LEFT + _WIDTH + _RIGHT,
        height=top + 26 + height + _AXIS_HEIGHT,
        looks=LOOKS,
        legend=legend,
        legend_end=x,
        top=top,
        bars={"x": _LEFT, "width": _WIDTH, "height": height},
        panels=panels,
        scale=scale,
        ticks=[*ticks, end_s],
    )
