"""What a profile has measured so far, kept in a journal for an attempt after this one."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pipectl.profile import StageOverhead
from pipectl.profiler.fit import Fit
from pipectl.profiler.journal import Journal

Pairs = dict[str, tuple[float, float]]
"""(forward_s, backward_s) by operator."""
_FIT = "stages"


@dataclass(frozen=True)
class Timed:
    """Times of every operator at one micro-batch size.

    Args:
        cached: in stages whose data stays in the cache; empty if the whole graph's does.
        loading_s: to load a micro-batch; 0 where processes beside the rank do that.
    """

    uncached: Pairs
    cached: Pairs
    loading_s: float = 0.0


class Records:
    """Measurements by what they are of.

    Args:
        journal: None keeps nothing.
    """

    def __init__(self, journal: Journal | None) -> None:
        self.journal = journal

    def match(self, fingerprint: str) -> None:
        """Forget what was measured of another graph."""
        if self.journal is not None:
            self.journal.match(fingerprint)

    def times(self, size: int) -> Timed | None:
        """Times at a micro-batch size."""
        entry = None if self.journal is None else self.journal.find(str(size))
        if entry is None:
            return None
        return Timed(_pairs(entry["uncached"]), _pairs(entry["cached"]), entry["loading_s"])

    def note_times(self, size: int, timed: Timed) -> None:
        """Keep times at a micro-batch size."""
        if self.journal is not None:
            self.journal.note(str(size), asdict(timed))

    def fit(self) -> Fit | None:
        """What stages take besides their operators."""
        entry = None if self.journal is None else self.journal.find(_FIT)
        if entry is None:
            return None
        forward, backward = entry["factors"]
        return Fit(StageOverhead(**entry["stage"]), (forward, backward), entry["error"])

    def note_fit(self, fit: Fit) -> None:
        """Keep what stages take besides their operators."""
        if self.journal is not None:
            self.journal.note(_FIT, asdict(fit))


def _pairs(entry: dict[str, list[float]]) -> Pairs:
    return {name: (forward_s, backward_s) for name, (forward_s, backward_s) in entry.items()}
