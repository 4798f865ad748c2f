"""Cores, memory and a compiler."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

from pipectl.jobs.doctor.finding import Finding, Findings, Level
from pipectl.units import format_bytes

_SHARED = 256 << 20


def machine() -> Findings:
    """What this machine has, and what of it is short."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("machine", Level.OK, f"{cores} cores, {format_bytes(memory)} of memory")
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total
        if shared < _SHARED:
            text = f"/dev/shm holds {format_bytes(shared)} only"
            cure = "containers: start them with --shm-size=1g, or ranks of one node may crash"
            yield Finding("shared memory", Level.WARN, text, cure)
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        text = "no C++ compiler, which training.compile would need"
        yield Finding("compiler", Level.OK, text)
