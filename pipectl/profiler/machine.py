"""The machine that is measured: its accelerator, cache and clock, and its live memory.

On the CPU the allocator reports every allocation and release to torch's profiler, including
temporary values of operators; accelerators count on their own. Neither sees libraries with an
allocator of their own (work buffers of MKL, for example).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile, record_function

from pipectl.older_python import Self
from pipectl.runtime.device import CpuDevice, Device, choose_device
from pipectl.torch_api import allocated_bytes, peak_bytes, reset_peak

Clock = Callable[[], float]
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_THREAD = Path("/proc/thread-self/schedstat")
"""Nanoseconds on a core, and ready to run without one."""
_ASSUMED_BYTES = 32 << 20
_LOOKS, _MORE, _NEGLIGIBLE_S = 3, 0.2, 2e-4
"""At every look, a run that does not only compute in its thread takes this share longer than the
thread computes, and more than this time."""
_MARK = "pipectl: end of phase"


def accelerator_name(accelerators_per_node: int) -> str | None:
    """Return the name of the accelerator, such as ``NVIDIA H200``; None for the CPU.

    Args:
        accelerators_per_node: as in the job spec.
    """
    device = choose_device(accelerators_per_node, 0).torch_device
    if device.type == "cpu":
        return None
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))


def last_level_bytes(caches: Path = _CACHES) -> int:
    """Return the size of the largest cache of this machine; 32 MiB if it is not known."""
    sizes = [0]
    for index in caches.glob("index*"):
        try:
            text = (index / "size").read_text(encoding="ascii").strip()
        except OSError:
            continue
        number, factor = (text[:-1], 1024) if text.endswith("K") else (text, 1)
        if number.isdigit():
            sizes.append(int(number) * factor)
    return max(sizes) or _ASSUMED_BYTES


def clock_of(device: Device) -> Clock:
    """Return a clock in seconds that first waits for all work queued on the device.

    On a CPU with one thread per rank, it is the processor time of the calling thread, so turns with
    other processes on the same core do not count.
    """
    if isinstance(device, CpuDevice):
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def clock() -> float:
        device.synchronize()
        return time.perf_counter()

    return clock


def clock_for(device: Device, run: Callable[[], object]) -> Clock:
    """Return the clock of a device for what is run on it.

    If it is the processor time of this thread and ``run`` takes clearly longer, operators wait for
    something, or compute in threads of their own: then it is :func:`loading_clock`.
    """
    clock = clock_of(device)
    if clock is not time.thread_time:
        return clock
    for _ in range(_LOOKS):
        begin_s, before_s = loading_clock(), time.thread_time()
        run()
        own_s = time.thread_time() - before_s
        if loading_clock() - begin_s - own_s < max(_MORE * own_s, _NEGLIGIBLE_S):
            return clock
    return loading_clock


def loading_clock() -> float:
    """Return a clock in seconds for work that may wait for a disk, but not for a core.

    While other processes have the core of the calling thread, it stands still, where the system
    says so.
    """
    waited_ns = 0
    with suppress(OSError, LookupError, ValueError):
        waited_ns = int(_THREAD.read_text(encoding="ascii").split()[1])
    return time.perf_counter() - waited_ns / 1e9


class Phase(NamedTuple):
    """Live bytes during a part of a recording.

    Args:
        peak_bytes: the maximum above the level at the start of the recording; at least what was
            live when the phase began.
        end_bytes: live bytes at its end.
    """

    peak_bytes: int
    end_bytes: int


def record_allocated(device: torch.device) -> Recording:
    """Return a recording for tensors of ``device``."""
    return Recording() if device.type == "cpu" else _OnAccelerator(device)


class Recording:
    """Records live bytes of the CPU within its context; ``phases`` are complete afterwards."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self._profile: Any = None

    def __enter__(self) -> Self:
        # Kineto writes a line to stderr whenever it starts or stops, unless it is told not to.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profile(profile_memory=True)
        self._profile.__enter__()
        return self

    def mark(self) -> None:
        """End a phase; the last one ends with the recording."""
        with record_function(_MARK):
            pass

    def __exit__(self, *raised: Any) -> None:
        self._profile.__exit__(*raised)
        level = peak = 0
        for event in sorted(self._profile.kineto_results.events(), key=lambda e: e.start_ns()):
            if event.name() == "[memory]":
                level += event.nbytes()
                peak = max(peak, level)
            elif event.name() == _MARK:
                self.phases.append(Phase(peak, level))
                peak = level
        self.phases.append(Phase(peak, level))


class _OnAccelerator(Recording):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __enter__(self) -> Self:
        torch.accelerator.synchronize(self._device)
        reset_peak(self._device)
        self._start = allocated_bytes(self._device)
        return self

    def mark(self) -> None:
        torch.accelerator.synchronize(self._device)
        peak = peak_bytes(self._device) - self._start
        level = allocated_bytes(self._device) - self._start
        if self.phases:  # values released since the mark, by the garbage collector for instance
            peak = max(peak, self.phases[-1].end_bytes)
        self.phases.append(Phase(peak, level))
        reset_peak(self._device)

    def __exit__(self, *_: Any) -> None:
        self.mark()
