"""Whether this machine has what jobs need, one finding after the other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.jobs.doctor.batch_systems import pbs, slurm
from pipectl.jobs.doctor.environment import python, torch
from pipectl.jobs.doctor.files import file_system
from pipectl.jobs.doctor.finding import Finding, Findings, Level
from pipectl.jobs.doctor.hardware import machine
from pipectl.jobs.doctor.launch import mpi

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

__all__ = ["Finding", "Level", "examine"]


def examine(spec: JobSpec | None, directory: Path) -> Findings:
    """What there is, and what is wrong with it.

    Args:
        spec: whose launch is tried out; None for that of a job that says nothing of it.
        directory: of the run directories.
    """
    yield from python()
    yield from torch()
    yield from mpi(spec)
    yield from slurm(spec)
    yield from pbs()
    yield from file_system(directory)
    yield from machine()
