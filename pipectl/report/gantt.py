"""A timeline as text: one row per rank, readable without colour.

Two stages and two micro-batches, 40 columns wide::

    rank 0 0░░░░░1░░░░░          0███████1███████UU
    rank 1       0░░░░░0███████1░░░░░1███████UU

``░`` is forward, ``█`` backward, ``U`` the optimizer step, a blank is idle; the digits at the start
of a block are its micro-batch, shown where the block is wider than they are. Where blocks would be
too many for the columns, the shares of the characters are those of the time. :func:`legend` names
what else occurs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from pipectl.timeline import Event, Timeline

FILLS = {
    "forward": "░",
    "backward": "█",
    "backward_input": "█",
    "backward_weight": "▓",
    "recompute": "▒",
    "reduce_wait": "R",
    "update": "U",
    "evaluate": "E",
}
"""Characters, of all kinds that are drawn."""
COLOURS = {
    "forward": "#7fb3d5",
    "backward": "#e59866",
    "backward_input": "#e59866",
    "backward_weight": "#c9a9dc",
    "recompute": "#b6d3e6",
    "reduce_wait": "#e3c567",
    "update": "#82b366",
    "evaluate": "#aab7b8",
}
NAMES = {
    "forward": "forward",
    "recompute": "forward again",
    "backward": "backward",
    "backward_input": "backward (inputs)",
    "backward_weight": "backward (weights)",
    "reduce_wait": "sum of gradients",
    "update": "update",
    "evaluate": "evaluation",
}

IDLE = "idle"
_MIN_COLUMNS = 2
"""Of a block on average; with less, the small ones would push the others away."""
MAX_RANKS = 32


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


def legend(timeline: Timeline, *, max_ranks: int = MAX_RANKS) -> str:
    """What the characters mean, of those that occur; and whether ranks are left out."""
    kinds = {event.kind for event in timeline.events}
    marks = "  ".join(f"{FILLS[kind]} {name}" for kind, name in NAMES.items() if kind in kinds)
    shown = len(drawn_ranks([timeline], max_ranks))
    some = f", {shown} of {timeline.ranks:,} ranks are shown" if shown < timeline.ranks else ""
    return f"{marks}  (digits: micro-batch, blank: idle{some})"


def gantt(timeline: Timeline, width: int, *, max_ranks: int = MAX_RANKS) -> list[Row]:
    """Rows of a timeline.

    Args:
        timeline: one optimizer step.
        width: columns of the terminal, label included.
        max_ranks: more ranks than this are thinned out evenly; the first and last are always shown.
    """
    end_s = timeline.end_s
    if end_s <= 0:
        return []
    ranks = drawn_ranks([timeline], max_ranks)
    by_rank: dict[int, list[Event]] = {rank: [] for rank in ranks}
    for event in timeline.events:
        if event.rank in by_rank and event.kind in FILLS:
            by_rank[event.rank].append(event)
    digits = len(str(timeline.ranks - 1))
    columns = max(10, width - len("rank ") - digits - 1)
    return [
        Row(f"rank {rank:>{digits}} ", tuple(_row(by_rank[rank], columns, end_s))) for rank in ranks
    ]


def shown_ranks(ranks: int, max_ranks: int) -> Sequence[int]:
    """All ranks, or at most so many of them, evenly spread from the first to the last."""
    if ranks <= max_ranks:
        return range(ranks)
    return sorted({round(row * (ranks - 1) / (max_ranks - 1)) for row in range(max_ranks)})


def drawn_ranks(timelines: Iterable[Timeline], max_ranks: int) -> Sequence[int]:
    """As :func:`shown_ranks`, of those of which there is something to draw."""
    return spread_over(recorded_ranks(timelines), max_ranks)


def spread_over(ranks: Sequence[int], max_ranks: int) -> list[int]:
    """So many of some ranks, spread as :func:`shown_ranks` are over all."""
    return [ranks[place] for place in shown_ranks(len(ranks), max_ranks)]


def recorded_ranks(timelines: Iterable[Timeline]) -> Sequence[int]:
    """The ranks that have events in all timelines; all ranks if none has."""
    timelines = list(timelines)
    recorded = [{event.rank for event in timeline.events} for timeline in timelines]
    return sorted(set.intersection(*recorded)) or range(max(each.ranks for each in timelines))


def _row(events: Sequence[Event], columns: int, end_s: float) -> Iterator[Segment]:
    """Blocks while there is room for them, else textures."""
    dense = len(events) * _MIN_COLUMNS > columns
    return _textures(events, columns, end_s) if dense else _segments(events, columns, end_s)


def _textures(events: Sequence[Event], columns: int, end_s: float) -> Iterator[Segment]:
    """Every column shows one of the kinds in it, each as often as its share of the time.

    What a column cannot show of its kinds is carried to the next.
    """
    owed: dict[str, float] = {}
    for spent in _spent(events, columns, end_s):
        for kind, share in spent.items():
            owed[kind] = owed.get(kind, 0.0) + share
        kind = max(spent, key=lambda each: owed[each])
        owed[kind] -= 1.0
        yield Segment(kind, FILLS.get(kind, " "))


def _spent(events: Sequence[Event], columns: int, end_s: float) -> list[dict[str, float]]:
    """Share of every column that each kind takes, idle time included."""
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for event in events:
        start, stop = event.start_s / end_s * columns, event.end_s / end_s * columns
        for column in range(int(start), min(columns, ceil(stop))):
            share = min(stop, column + 1) - max(start, column)
            shares[column][event.kind] = shares[column].get(event.kind, 0.0) + share
    for spent in shares:
        spent[IDLE] = max(0.0, 1.0 - sum(spent.values()))
    return shares


def _segments(events: Sequence[Event], columns: int, end_s: float) -> Iterator[Segment]:
    """Blocks and gaps from left to right; every event gets a column while there is room."""
    column = 0
    for event in sorted(events, key=lambda event: event.start_s):
        start = max(column, round(event.start_s / end_s * columns))
        stop = min(columns, max(start + 1, round(event.end_s / end_s * columns)))
        if start >= stop:
            continue
        if start > column:
            yield Segment(IDLE, " " * (start - column))
        yield Segment(event.kind, _block(event, stop - start))
        column = stop
    if column < columns:
        yield Segment(IDLE, " " * (columns - column))


def _block(event: Event, width: int) -> str:
    """A block's text: its micro-batch where at least one column is left to tell the kind."""
    label = str(event.micro_batch) if event.micro_batch >= 0 else ""
    shown = label if len(label) < width else ""
    return shown + FILLS[event.kind] * (width - len(shown))
