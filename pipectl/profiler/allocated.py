"""How many bytes of tensors are live, temporaries within operators included.

On the CPU the allocator reports every allocation and release to torch's profiler, also those that
an operator makes and drops again; accelerators count by themselves. Libraries that bring their own
allocator (MKL's work buffers, say) are not seen by either.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.autograd.profiler import profile, record_function

_MARK = "pipectl: end of phase"


@dataclass(frozen=True)
class Phase:
    """Live bytes during a part of a recording.

    Args:
        peak_bytes: the most, above the level at the start of the recording; at least what was
            live when the phase began.
        end_bytes: what is live at its end.
    """

    peak_bytes: int
    end_bytes: int


class Recording(Protocol):
    """Records live bytes while it is entered; ``phases`` are complete once it is left."""

    phases: list[Phase]

    def mark(self) -> None:
        """End a phase; the last one ends with the recording."""

    def __enter__(self) -> Recording:
        """Begin to record."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End the last phase."""


def record_allocated(device: torch.device) -> Recording:
    """A recording for tensors of ``device``."""
    return _OnCpu() if device.type == "cpu" else _OnAccelerator(device)


class _OnCpu:
    def __init__(self) -> None:
        self.phases: list[Phase] = []
        # Kineto writes a line to stderr whenever it starts or stops, unless it is told not to.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile: Any = profile(profile_memory=True)

    def mark(self) -> None:
        with record_function(_MARK):
            pass

    def __enter__(self) -> _OnCpu:
        self._profile.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._profile.__exit__(*raised)
        events = sorted(self._profile.kineto_results.events(), key=lambda event: event.start_ns())
        level = peak = 0
        for event in events:
            if event.name() == "[memory]":
                level += event.nbytes()
                peak = max(peak, level)
            elif event.name() == _MARK:
                self.phases.append(Phase(peak, level))
                peak = level
        self.phases.append(Phase(peak, level))


class _OnAccelerator:
    def __init__(self, device: torch.device) -> None:
        self.phases: list[Phase] = []
        self._device = device
        self._start = 0

    def mark(self) -> None:
        torch.accelerator.synchronize(self._device)
        peak, level = self._peak() - self._start, self._level() - self._start
        if self.phases:  # values released since the mark, by the garbage collector for instance
            peak = max(peak, self.phases[-1].end_bytes)
        self.phases.append(Phase(peak, level))
        torch.accelerator.reset_peak_memory_stats(self._device)

    def __enter__(self) -> _OnAccelerator:
        torch.accelerator.synchronize(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._start = self._level()
        return self

    def __exit__(self, *_: Any) -> None:
        self.mark()

    def _peak(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self._device))

    def _level(self) -> int:
        return int(torch.accelerator.memory_allocated(self._device))


def peak_bytes_of(function: Callable[[], object], device: torch.device) -> int:
    """The most bytes a call allocates at once."""
    with record_allocated(device) as recording:
        function()
    return recording.phases[-1].peak_bytes
