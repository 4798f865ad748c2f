"""The progress of a profile, in units of the time that its parts are expected to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is or was done); a total of 0 says that nobody knows how long."""
_UNITS = 1000


class Work:
    """Parts of known weight, each advancing from 0 to 1.

    Args:
        weights: time that each part takes, relative to the others.
    """

    def __init__(self, progress: Progress | None, weights: Mapping[str, float]) -> None:
        self._progress = progress
        total = sum(weights.values()) or 1.0
        self._units = {part: _UNITS * weight / total for part, weight in weights.items()}
        self._before = 0.0

    def advance(self, part: str, share: float, name: str | None = None) -> None:
        """Report the share of a part that is done.

        Args:
            name: of what was just done, if not of the part.
        """
        if self._progress is not None:
            done = self._before + self._units[part] * share
            self._progress(round(done), _UNITS, name or part)

    def end(self, part: str) -> None:
        """Report that a part is done."""
        self.advance(part, 1.0)
        self._before += self._units[part]
