"""A timeline as text, readable without colour, and as a picture in SVG.

Two stages and two micro-batches, 40 columns wide::

    rank 0 0░░░░░1░░░░░          0███████1███████UU
    rank 1       0░░░░░0███████1░░░░░1███████UU

``░`` is forward, ``█`` backward, ``U`` the optimizer step, a blank is idle; the digits at the start
of a block are its micro-batch, shown if the block is wider than they are. If blocks would be too
many for the columns, the shares of the characters are those of the time. :func:`legend` names what
else occurs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipectl.report.svg import LINE, document, text, tick
from pipectl.timeline import Event, Timeline
from pipectl.units import format_time


class Look(NamedTuple):
    """How actions of a kind are drawn: in text, in pictures, and what legends call them."""

    fill: str
    colour: str
    name: str


LOOKS = {
    "forward": Look("░", "#7fb3d5", "forward"),
    "recompute": Look("▒", "#b6d3e6", "forward again"),
    "backward": Look("█", "#e59866", "backward"),
    "backward_input": Look("█", "#e59866", "backward (inputs)"),
    "backward_weight": Look("▓", "#c9a9dc", "backward (weights)"),
    "reduce_wait": Look("R", "#e3c567", "sum of gradients"),
    "update": Look("U", "#82b366", "update"),
    "evaluate": Look("E", "#aab7b8", "evaluation"),
}
"""Of all kinds that are drawn."""
IDLE = "idle"
MAX_RANKS = 32
"""Rows of text, or on a page."""
_MIN_COLUMNS = 2
"""Of a block on average; with less, the small ones would push the others away."""
_STYLE = "\n".join(f".{kind} {{ fill: {look.colour} }}" for kind, look in LOOKS.items())
_WIDTH, _LEFT, _RIGHT, _ROW_HEIGHT, _BAR_HEIGHT, _AXIS = 960, 64, 24, 30, 24, 30
_LEGEND_HEIGHT = 30
_NAME_HEIGHT, _GAP = 22, 6  # above the rows of one timeline among several
_LETTER = 7  # width of a letter at most, in pixels
_TICKS = 10  # at most, about
_MAX_ROWS, _MAX_BARS = 64, 20_000  # a picture that a browser still shows at once


@dataclass(frozen=True)
class Segment:
    """Neighbouring characters of one kind, so that a terminal can colour them."""

    kind: str
    text: str


@dataclass(frozen=True)
class Row:
    """One line: a label of fixed width, then the segments in order of time."""

    label: str
    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        return (self.label + "".join(segment.text for segment in self.segments)).rstrip()


def shown_ranks(ranks: int, max_ranks: int) -> Sequence[int]:
    """All ranks, or at most so many of them, evenly spread from the first to the last."""
    if ranks <= max_ranks:
        return range(ranks)
    return sorted({round(row * (ranks - 1) / (max_ranks - 1)) for row in range(max_ranks)})


def drawn_ranks(timelines: Iterable[Timeline], max_ranks: int = MAX_RANKS) -> list[int]:
    """As :func:`shown_ranks`, of those that have events in all timelines; of all if none has."""
    timelines = list(timelines)
    recorded = [{event.rank for event in timeline.events} for timeline in timelines]
    ranks = sorted(set.intersection(*recorded)) or range(max(each.ranks for each in timelines))
    return [ranks[place] for place in shown_ranks(len(ranks), max_ranks)]


def legend(timeline: Timeline) -> str:
    """What the characters mean, of those that occur; and whether ranks are left out."""
    kinds = {event.kind for event in timeline.events}
    marks = "  ".join(f"{look.fill} {look.name}" for kind, look in LOOKS.items() if kind in kinds)
    shown = len(drawn_ranks([timeline]))
    some = f", {shown} of {timeline.ranks:,} ranks are shown" if shown < timeline.ranks else ""
    return f"{marks}  (digits: micro-batch, blank: idle{some})"


def gantt(timeline: Timeline, width: int) -> list[Row]:
    """Rows of a timeline; of very many ranks some, evenly spread.

    Args:
        timeline: one optimizer step.
        width: columns of the terminal, label included.
    """
    end_s = timeline.end_s
    if end_s <= 0:
        return []
    by_rank: dict[int, list[Event]] = {rank: [] for rank in drawn_ranks([timeline])}
    for event in timeline.events:
        if event.rank in by_rank and event.kind in LOOKS:
            by_rank[event.rank].append(event)
    digits = len(str(timeline.ranks - 1))
    columns = max(10, width - len("rank ") - digits - 1)
    rows = []
    for rank, events in by_rank.items():
        draw = _textures if len(events) * _MIN_COLUMNS > columns else _blocks
        rows.append(Row(f"rank {rank:>{digits}} ", tuple(draw(events, columns, end_s))))
    return rows


def _textures(events: Sequence[Event], columns: int, end_s: float) -> Iterator[Segment]:
    """Every column shows one of the kinds in it, each as often as its share of the time.

    What a column cannot show of its kinds is carried to the next.
    """
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for event in events:
        start, stop = event.start_s / end_s * columns, event.end_s / end_s * columns
        for column in range(int(start), min(columns, math.ceil(stop))):
            share = min(stop, column + 1) - max(start, column)
            shares[column][event.kind] = shares[column].get(event.kind, 0.0) + share
    owed: dict[str, float] = {}
    for spent in shares:
        spent[IDLE] = max(0.0, 1.0 - sum(spent.values()))
        for kind, share in spent.items():
            owed[kind] = owed.get(kind, 0.0) + share
        kind = max(spent, key=lambda each: owed[each])
        owed[kind] -= 1.0
        yield Segment(kind, LOOKS[kind].fill if kind in LOOKS else " ")


def _blocks(events: Sequence[Event], columns: int, end_s: float) -> Iterator[Segment]:
    """Blocks and gaps from left to right; every event gets a column while there is room.

    A block shows its micro-batch if at least one column is left to tell the kind.
    """
    column = 0
    for event in sorted(events, key=lambda event: event.start_s):
        start = max(column, round(event.start_s / end_s * columns))
        stop = min(columns, max(start + 1, round(event.end_s / end_s * columns)))
        if start >= stop:
            continue
        if start > column:
            yield Segment(IDLE, " " * (start - column))
        label = str(event.micro_batch) if event.micro_batch >= 0 else ""
        label = label if len(label) < stop - start else ""
        yield Segment(event.kind, label + LOOKS[event.kind].fill * (stop - start - len(label)))
        column = stop
    if column < columns:
        yield Segment(IDLE, " " * (columns - column))


def gantt_svg(timelines: Timeline | Mapping[str, Timeline], title: str, *notes: str) -> str:
    """A self-contained SVG document; of very many ranks it shows some.

    Args:
        timelines: one step, or several one above the other on one axis of time, by their names,
            which stand above each with its length.
        title: of all.
        notes: lines below the title.
    """
    if isinstance(timelines, Timeline):
        timelines = {"": timelines}
    ranks = max(timeline.ranks for timeline in timelines.values())
    end_s = max(timeline.end_s for timeline in timelines.values())
    rows = {rank: row for row, rank in enumerate(_affordable_ranks(list(timelines.values())))}
    if len(rows) < ranks:
        notes = (*notes, f"{len(rows)} of {ranks:,} ranks are shown")
    top = 28 + LINE * len(notes) + _LEGEND_HEIGHT
    scale = (_WIDTH - _LEFT - _RIGHT) / (end_s or 1.0)
    body = [*_legend_svg(timelines.values(), top - 18)]
    axis_top, bars = 0, list[str]()
    for name, timeline in timelines.items():
        if name:
            top += _NAME_HEIGHT
            body.append(text(8, top - 8, f"{name}: {format_time(timeline.end_s)}"))
        axis_top = axis_top or top
        wide = round(timeline.end_s * scale) or _WIDTH - _LEFT - _RIGHT
        for rank, row in rows.items():
            y = top + row * _ROW_HEIGHT
            body.append(text(8, y + 16, f"rank {rank}"))
            body.append(_rect(IDLE, _LEFT, y, wide))
        for event in timeline.events:
            if event.kind in LOOKS and event.rank in rows:
                bars.append(_bar(event, scale, top + rows[event.rank] * _ROW_HEIGHT))
        bottom = top + len(rows) * _ROW_HEIGHT
        top = bottom + _GAP
    body += [*_axis(end_s, scale, axis_top, bottom), *bars]
    return document(title, notes, body, (_WIDTH, bottom + _AXIS), _STYLE)


def _affordable_ranks(timelines: Sequence[Timeline]) -> list[int]:
    """So many that a browser still shows all of their bars."""
    every = drawn_ranks(timelines, max(each.ranks for each in timelines))
    known = set(every)
    drawn = (event for each in timelines for event in each.events if event.kind in LOOKS)
    bars = sum(event.rank in known for event in drawn)
    affordable = _MAX_BARS * len(every) // max(1, bars)
    return drawn_ranks(timelines, max(2, min(_MAX_ROWS, affordable)))


def _legend_svg(timelines: Iterable[Timeline], y: int) -> Iterator[str]:
    """The kinds that occur, then what the rest means."""
    x, kinds = _LEFT, {event.kind for each in timelines for event in each.events}
    for kind, look in LOOKS.items():
        if kind in kinds:
            name = "optimizer step" if kind == "update" else look.name
            yield f'<rect class="{kind}" x="{x}" y="{y - 10}" width="12" height="12"/>'
            yield text(x + 17, y, name)
            x += 17 + _LETTER * len(name) + 14
    yield text(x, y, "number: micro-batch; empty: waiting", "faint")


def _axis(end_s: float, scale: float, top: int, bottom: int) -> Iterator[str]:
    """Vertical lines at round times, and the end of the step."""
    interval_s = 1.0
    if end_s > 0:  # the next of 1, 2, 5, 10, 20, ...
        power = 10.0 ** math.floor(math.log10(end_s / _TICKS))
        rounds = (power * factor for factor in (1, 2, 5, 10))
        interval_s = next(time_s for time_s in rounds if time_s >= end_s / _TICKS * 0.999)
    room_s = 60 / scale  # so that no label runs into the last one
    times_s = (interval_s * index for index in range(_TICKS * 2))
    for time_s in [*(time_s for time_s in times_s if time_s < end_s - room_s), end_s]:
        x = round(_LEFT + time_s * scale, 1)
        yield tick(x, top - 4, x, bottom)
        yield text(x, bottom + 16, format_time(time_s) if time_s else "0", "faint", "middle")


def _rect(kind: str, x: float, y: int, wide: float) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y}" width="{wide:g}" height="{_BAR_HEIGHT}"/>'


def _bar(event: Event, scale: float, y: int) -> str:
    x = round(_LEFT + event.start_s * scale, 2)
    wide = round(max(0.5, (event.end_s - event.start_s) * scale - 0.5), 2)
    rect = _rect(event.kind, x, y, wide)
    label = str(event.micro_batch) if event.micro_batch >= 0 else ""
    if not label or wide < 8 * len(label) + 2:
        return rect
    return rect + text(round(x + wide / 2, 2), y + 16, label, "bar")
