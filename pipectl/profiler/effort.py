"""How much time a profile may take: quick figures or steady ones."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Rounds:
    """How often to repeat a measurement: at least, at most, and within which time in between."""

    least: int
    most: int
    budget_s: float


class Effort(Enum):
    """What the user asks for."""

    FAST = "fast"
    NORMAL = "normal"
    THOROUGH = "thorough"

    @property
    def operators(self) -> Rounds:
        """Rounds in which the operators of one micro-batch size are timed."""
        return _OPERATORS[self]

    @property
    def stages(self) -> Rounds:
        """Rounds in which random stages are timed, for what the sum of operators misses."""
        return _STAGES[self]

    @property
    def size_factor(self) -> int | None:
        """Ratio of neighbouring micro-batch sizes; None measures two sizes only."""
        return _SIZE_FACTORS[self]


_OPERATORS = {
    Effort.FAST: Rounds(2, 5, 1.0),
    Effort.NORMAL: Rounds(3, 15, 3.0),
    Effort.THOROUGH: Rounds(9, 50, 15.0),
}
_STAGES = {
    Effort.FAST: Rounds(2, 5, 1.0),
    Effort.NORMAL: Rounds(3, 9, 6.0),
    Effort.THOROUGH: Rounds(5, 25, 20.0),
}
_SIZE_FACTORS = {Effort.FAST: None, Effort.NORMAL: 4, Effort.THOROUGH: 2}
