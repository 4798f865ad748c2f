"""The device that a profile is measured on, as far as it decides what operators cost."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.profile import MeasuredOn

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


def this_device(spec: JobSpec, kind: str | None) -> MeasuredOn:
    """The device of a rank on this machine.

    Args:
        kind: its name among the job's devices; by default ``cpu`` or the accelerator's name.
    """
    accelerator = _accelerator(spec.resources.gpus_per_node)
    return MeasuredOn(
        kind=kind or accelerator or "cpu",
        model=accelerator or processor(),
        cores=len(os.sched_getaffinity(0)),
        threads=spec.threads,
        torch=_installed("torch"),
    )


def _accelerator(wanted: int) -> str | None:
    if not wanted:
        return None  # without loading torch
    from pipectl.profiler.machine import accelerator_name

    return accelerator_name(wanted)


def processor() -> str:
    """What the kernel calls the first processor; its architecture where it names none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
