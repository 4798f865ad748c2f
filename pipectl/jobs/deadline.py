"""When planning has to end: after a budget of time, or when the user has seen enough."""

from __future__ import annotations

import time
from collections.abc import Callable


class Deadline:
    """Asked by the planner now and then whether it has to come to an end.

    Args:
        budget_s: for each plan; None for as long as it takes.
        clock: seconds from any start.
    """

    def __init__(
        self, budget_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget_s = budget_s
        self._clock = clock
        self._started_s = clock()
        self._interrupted = False
        self._cut_short = False

    def __call__(self) -> bool:
        """Whether time is up."""
        late = self.budget_s is not None and self._clock() - self._started_s >= self.budget_s
        self._cut_short = self._cut_short or late or self._interrupted
        return late or self._interrupted

    def restart(self) -> None:
        """Begin the budget of the next plan; an interrupt holds for all."""
        self._started_s = self._clock()

    def interrupt(self) -> None:
        """Have the planner end as soon as it can."""
        self._interrupted = True

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it."""
        return self._interrupted

    @property
    def cut_short(self) -> bool:
        """Whether a planner was told that time is up."""
        return self._cut_short
