"""The time that a profile may take, its progress, and the micro-batch sizes that it measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from pipectl.spec import JobSpec
from pipectl.units import Report

_MICRO_BATCHES_PER_STAGE = 2
_UNITS = 1000


@dataclass(frozen=True)
class Rounds:
    """How often to repeat a measurement: at least, at most, and the time limit in between."""

    min_rounds: int
    max_rounds: int
    budget_s: float


class Effort(Enum):
    """The user's choice: quick figures or steady ones."""

    FAST = "fast"
    NORMAL = "normal"
    THOROUGH = "thorough"

    @property
    def operators(self) -> Rounds:
        """Rounds in which the operators of one micro-batch size are timed."""
        return _LIMITS[self][0]

    @property
    def stages(self) -> Rounds:
        """Rounds in which random stages are timed, for what the sum of operators misses."""
        return _LIMITS[self][1]


_LIMITS = {
    Effort.FAST: (Rounds(2, 5, 1.0), Rounds(2, 5, 1.0)),
    Effort.NORMAL: (Rounds(3, 15, 3.0), Rounds(3, 9, 6.0)),
    Effort.THOROUGH: (Rounds(9, 50, 15.0), Rounds(5, 25, 20.0)),
}
"""Rounds for operators and for stages."""


def measured_sizes(spec: JobSpec, effort: Effort = Effort.NORMAL) -> tuple[int, ...]:
    """Return the micro-batch sizes to measure, the size of the profile first.

    It is one size if the spec sets the number of micro-batches; else several for the planner to
    choose from: two with ``fast``, otherwise each twice as large as the one before, from single
    samples to the whole batch. Caches make times of sizes further apart hard to interpolate.
    """
    batch = spec.training.batch_size
    if spec.pipeline.micro_batches is not None:
        return (-(-batch // spec.pipeline.micro_batches),)
    stages = spec.pipeline.stages or spec.resources.ranks
    base = max(1, -(-batch // (_MICRO_BATCHES_PER_STAGE * stages)))
    if effort is Effort.FAST:
        return tuple(dict.fromkeys((base, max(1, base // 4))))
    below = [base >> power for power in range(1, base.bit_length())]
    above = [base << power for power in range(1, batch.bit_length())]
    further = {1, batch, *(size for size in (*below, *above) if 1 <= size <= batch)}
    return (base, *sorted(further - {base}))


def sizes_from(sizes: Sequence[int], least: int) -> tuple[int, ...]:
    """Return the sizes to measure for a model that takes no micro-batch below a size."""
    return tuple(dict.fromkeys(max(size, least) for size in sizes))


class Work:
    """Parts of known weight, each advancing from 0 to 1.

    Args:
        weights: time that each part takes, relative to the others.
    """

    def __init__(self, progress: Report | None, weights: Mapping[str, float]) -> None:
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
