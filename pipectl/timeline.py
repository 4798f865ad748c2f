"""What each rank did when: the one record that the simulator and the engine both write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Event(NamedTuple):
    """One action of one rank; ``start_s`` counts from the start of the step.

    Args:
        kind: name of the action's kind in lower case, e.g. ``forward``.
        stage: -1 where the action belongs to no stage.
        micro_batch: -1 where the action belongs to no micro-batch.
    """

    rank: int
    start_s: float
    end_s: float
    kind: str
    stage: int = -1
    micro_batch: int = -1


@dataclass(frozen=True)
class Timeline:
    """Events of one optimizer step, by rank and start."""

    events: tuple[Event, ...]
    ranks: int

    @property
    def end_s(self) -> float:
        """End of the last event."""
        return max((event.end_s for event in self.events), default=0.0)

    def of_rank(self, rank: int) -> Iterator[Event]:
        """The events of one rank."""
        return (event for event in self.events if event.rank == rank)

    def busy_s(self, rank: int, kinds: Sequence[str]) -> float:
        """Time a rank spent in actions of the given kinds."""
        return sum(e.end_s - e.start_s for e in self.of_rank(rank) if e.kind in kinds)

    def to_json(self) -> dict[str, Any]:
        """Columns, so that long timelines stay small and readable."""
        return {
            "version": 1,
            "ranks": self.ranks,
            "columns": list(Event._fields),
            "events": [list(event) for event in self.events],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Timeline:
        """The inverse of :meth:`to_json`."""
        return cls(tuple(Event(*row) for row in document["events"]), document["ranks"])
