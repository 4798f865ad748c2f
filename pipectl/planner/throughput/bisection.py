"""The least time that can be kept, by asking for one time after the other.

A plan that keeps a time often is faster than that, so the upper end of the interval is the time of
a real plan, and mostly soon the best there is. Then one question, for a tick less, proves it. So
once the interval is short, every other question is that one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipectl.planner.throughput.decision import Cut, Decision

_FIRST_GUESSES = (1 / 32, 1 / 8, 1 / 2, 2, 8, 64)
"""Above the bound, relative to it. Too short times are refused quickly, long ones take longest."""
_NEAR = 1 / 64
"""An interval is short that is at most so long, relative to its start."""


@dataclass(frozen=True)
class Least:
    """The best plan found.

    Args:
        cuts: its stages; None if there is no plan at all.
        ticks: that its slowest stage takes at most.
        lower_ticks: no plan takes less.
    """

    cuts: tuple[Cut, ...] | None
    ticks: int
    lower_ticks: int


class Bisection:
    """Narrows down the least time; every answer is kept."""

    def __init__(self, decision: Decision, expired: Callable[[], bool]) -> None:
        self._decision = decision
        self._expired = expired
        self._cuts: tuple[Cut, ...] | None = None
        self._upper = decision.tables.slowest
        self._lower = self._proven = max(1, decision.least_ticks)

    def run(self) -> Least:
        """Search until the best plan is proven best, or time is up; some plan is always found."""
        self._first_plan()
        halve = True
        while self._cuts is not None and self._lower < self._upper:
            gap = self._upper - self._lower
            halve = halve or gap > self._lower * _NEAR
            if not self._ask(self._upper - 1 - halve * (gap // 2), self._expired):
                break
            halve = not halve
        return Least(self._cuts, self._upper, min(self._proven, self._upper))

    def _first_plan(self) -> None:
        """Any plan, from short times to long ones."""
        start, longest = self._lower, self._decision.tables.slowest
        for guess in _FIRST_GUESSES:
            ticks = start + int(start * guess)
            if ticks >= longest or not self._ask(ticks, self._expired):
                break
            if self._cuts is not None:
                return
        self._ask(longest, lambda: False)

    def _ask(self, ticks: int, expired: Callable[[], bool]) -> bool:
        """Narrow down by one answer; False if there was none."""
        answer = self._decision.ask(ticks, expired)
        if answer is None:
            return False
        if answer.cuts is not None:
            self._cuts = answer.cuts
            self._upper = max(cut.ticks for cut in answer.cuts)
        else:
            self._lower = ticks + 1
            if answer.proven:
                self._proven = max(self._proven, ticks + 1)
        return True
