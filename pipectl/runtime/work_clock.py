"""When an accelerator does the work of rows, whose calls return before it is done.

A pair of events encloses what each row queues. The pairs are read when the accelerator has passed
them, so that the rank never waits for that. For a recorded step, it waits once, at the beginning:
then the clocks of the rank and of the accelerator are compared.
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import torch


class Interval(NamedTuple):
    """The time that a row took on the accelerator.

    Args:
        row: as given to :meth:`WorkClock.begin`.
        start_s, end_s: by ``perf_counter``, where the clocks were compared; else only their
            difference counts.
    """

    row: int
    start_s: float
    end_s: float


class WorkClock:
    """Measures the rows of a rank on its accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Event] = []
        self._passed: list[tuple[int, torch.Event, torch.Event]] = []
        self._origin: torch.Event | None = None
        self._origin_s = 0.0

    def compare(self) -> None:
        """Compare the clocks; waits until the accelerator is idle."""
        torch.accelerator.current_stream().synchronize()
        self._origin = torch.Event(self._device, enable_timing=True)
        self._origin.record()
        self._origin_s = perf_counter()

    def begin(self, row: int) -> None:
        """Begin a row."""
        self._passed.append((row, self._event(), self._event()))
        self._passed[-1][1].record()

    def end(self) -> None:
        """End the row that began last."""
        self._passed[-1][2].record()

    def read(self, *, wait: bool = False) -> list[Interval]:
        """The rows, in order, that the accelerator has done and that were not read.

        Args:
            wait: for all rows that have ended.
        """
        intervals: list[Interval] = []
        while self._passed:
            row, start, end = self._passed[0]
            if wait:
                end.synchronize()
            elif not end.query():
                break
            self._passed.pop(0)
            self._free += start, end
            begin_s = 0.0
            if self._origin is not None:
                begin_s = self._origin_s + self._origin.elapsed_time(start) / 1000
            intervals.append(Interval(row, begin_s, begin_s + start.elapsed_time(end) / 1000))
        return intervals

    def forget(self) -> None:
        """End the comparison of clocks."""
        self._origin = None

    def _event(self) -> torch.Event:
        return self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
