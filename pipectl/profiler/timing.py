"""Times of operators: measured now, or found in the journal of an interrupted measurement."""

from __future__ import annotations

from dataclasses import asdict

from pipectl.profiler.costs import Call, Times, measure
from pipectl.profiler.journal import Journal
from pipectl.runtime.device import Device


class Timing:
    """Takes times of operators and keeps them.

    Args:
        budget_s: seconds to spend on an operator.
        journal: None keeps nothing.
    """

    def __init__(self, budget_s: float, journal: Journal | None) -> None:
        self._budget_s = budget_s
        self._journal = journal

    def of(self, key: str, call: Call, device: Device) -> Times:
        """The times of a call, under the name that it has in the journal."""
        found = None if self._journal is None else self._journal.find(key)
        if found is not None:
            return Times(found["forward_s"], found["backward_s"])
        times = measure(call, device, self._budget_s)
        if self._journal is not None:
            self._journal.note(key, asdict(times))
        return times
