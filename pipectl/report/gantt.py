"""A timeline as text: one row per rank, readable without colour.

Two stages and two micro-batches, 40 columns wide::

    rank 0 0░░░░░1░░░░░          0███████1███████UU
    rank 1       0░░░░░0███████1░░░░░1███████UU

``░`` is forward, ``█`` backward, ``U`` the optimizer step, a blank is idle; the digits at the start
of a block are its micro-batch, shown where the block is wider than they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipectl.timeline import Event, Timeline

FILLS = {
    "forward": "░",
    "backward": "█",
    "backward_input": "█",
    "backward_weight": "▓",
    "update": "U",
    "evaluate": "E",
}
IDLE = "idle"
LEGEND = "░ forward  █ backward  U update  (digits: micro-batch, blank: idle)"


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


def gantt(timeline: Timeline, width: int, *, max_ranks: int = 32) -> list[Row]:
    """Rows of a timeline.

    Args:
        timeline: one optimizer step.
        width: columns of the terminal, label included.
        max_ranks: more ranks than this are thinned out evenly; the first and last are always shown.
    """
    end_s = timeline.end_s
    if end_s <= 0:
        return []
    ranks = _shown(timeline.ranks, max_ranks)
    by_rank: dict[int, list[Event]] = {rank: [] for rank in ranks}
    for event in timeline.events:
        if event.rank in by_rank and event.kind in FILLS:
            by_rank[event.rank].append(event)
    digits = len(str(timeline.ranks - 1))
    columns = max(10, width - len("rank ") - digits - 1)
    return [
        Row(f"rank {rank:>{digits}} ", tuple(_segments(by_rank[rank], columns, end_s)))
        for rank in ranks
    ]


def _shown(ranks: int, max_ranks: int) -> Sequence[int]:
    if ranks <= max_ranks:
        return range(ranks)
    return sorted({round(row * (ranks - 1) / (max_ranks - 1)) for row in range(max_ranks)})


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
