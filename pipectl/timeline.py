"""What each rank did and when: the record that both the simulator and the engine write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pipectl.errors import DataFileError
from pipectl.fields import VERSION, Count, DataFile, read_fields
from pipectl.files import write_text


class Event(NamedTuple):
    """One action of one rank. ``start_s`` counts from the start of the step.

    Args:
        kind: name of the action's kind in lower case, e.g. ``forward``.
        stage: -1 if the action belongs to no stage.
        micro_batch: -1 if the action belongs to no micro-batch.
        channel: index of a message's channel among the plan's channels; otherwise -1.
    """

    rank: int
    start_s: float
    end_s: float
    kind: str
    stage: int = -1
    micro_batch: int = -1
    channel: int = -1


@dataclass(frozen=True)
class Timeline(DataFile):
    """Events of one optimizer step, by rank and start.

    Args:
        ranks: number of ranks of the plan; in large plans only some of them have events.
        step: number of the step, if it was measured.
        clock_error_s: maximum difference between the clocks of two nodes.
        differs: how a measured step differs from the one that the plan predicts; None if it does
            not.
    """

    hint: ClassVar[str] = "it is written again when the job runs again"
    events: tuple[Event, ...]
    ranks: int
    step: int | None = None
    clock_error_s: float = 0.0
    differs: str | None = None

    @property
    def end_s(self) -> float:
        """End of the last event."""
        return max((event.end_s for event in self.events), default=0.0)

    def of_rank(self, rank: int) -> Iterator[Event]:
        """Return the events of one rank."""
        return (event for event in self.events if event.rank == rank)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, in which each event is a list, to keep long timelines small."""
        return {**self._head(), "events": [list(event) for event in self.events]}

    def save(self, path: Path) -> None:
        """Replace the file atomically; each event is one line."""
        rows = ",\n".join(map(_row, self.events))
        head = "".join(f'"{key}": {json.dumps(value)},\n' for key, value in self._head().items())
        write_text(path, f'{{\n{head}"events": [\n{rows}\n]\n}}\n', durable=False)

    def _head(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "ranks": self.ranks,
            "step": self.step,
            "clock_error_s": self.clock_error_s,
            "differs": self.differs,
            "columns": list(Event._fields),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, file: str = "timeline") -> Timeline:
        """Convert a JSON object, the inverse of :meth:`to_json`.

        Raises:
            DataFileError: a field or an event is missing or wrong.
        """
        columns = read_fields(_Columns, document, file=file, hint=cls.hint)
        try:
            events = tuple(
                Event(**dict(zip(columns.columns, row, strict=True))) for row in columns.events
            )
        except (TypeError, ValueError) as error:
            raise DataFileError(
                f"{file}: events: do not fit the columns ({error})", hint=cls.hint
            ) from error
        for index, event in enumerate(events):
            if not _is_sound(event, columns.ranks):
                what = f"events[{index}]: {list(event)!r}"[:200]
                raise DataFileError(f"{file}: {what} is not an event of a rank", hint=cls.hint)
        return cls(events, columns.ranks, columns.step, columns.clock_error_s, columns.differs)


def shown_ranks(ranks: int, max_ranks: int) -> Sequence[int]:
    """Return at most ``max_ranks`` ranks, spread evenly from the first to the last."""
    if ranks <= max_ranks:
        return range(ranks)
    return sorted({round(row * (ranks - 1) / (max_ranks - 1)) for row in range(max_ranks)})


class _Columns(NamedTuple):
    """The JSON object; each event is a list of values."""

    columns: tuple[str, ...]
    events: tuple[tuple[Any, ...], ...]
    ranks: Count
    step: int | None = None
    clock_error_s: float = 0.0
    differs: str | None = None


def _is_sound(event: Event, ranks: int) -> bool:
    """Return whether an event has valid types, finite times and an existing rank."""
    rank, start_s, end_s, kind, stage, micro_batch, channel = event
    return (
        type(rank) is type(stage) is type(micro_batch) is type(channel) is int
        and type(start_s) in (int, float)
        and type(end_s) in (int, float)
        and type(kind) is str
        and 0 <= rank < ranks
        and -inf < start_s < inf
        and -inf < end_s < inf
    )


def _row(event: Event) -> str:
    """Format one line of the file, with times in nanosecond resolution."""
    return '[%d, %.9f, %.9f, "%s", %d, %d, %d]' % event  # noqa: UP031 - much the fastest
