"""Batch systems behind one protocol: render a script, submit, query, cancel, estimate.

A batch system's module, and what renders scripts, are imported when they are used.
"""

from __future__ import annotations

import os
import shutil
from importlib import import_module

from pipectl.batch.protocol import (
    CHECKPOINTED,
    Array,
    JobRequest,
    JobState,
    JobStatus,
    Queue,
    Scheduler,
    Template,
)
from pipectl.errors import UsageError
from pipectl.units import did_you_mean

LOCAL = "local"
__all__ = [
    "CHECKPOINTED", "LOCAL", "Array", "JobRequest", "JobState", "JobStatus", "Queue", "Scheduler",
    "Template", "allocation", "find_scheduler", "get_scheduler",
]  # fmt: skip


_KINDS = {LOCAL: "LocalScheduler", "slurm": "SlurmScheduler", "pbs": "PbsScheduler"}
"""The class of each system, in the module of this package that is called as the system."""
# Slurm comes with commands named as those of PBS, so that it is looked for first.
_COMMANDS = {"slurm": ("sbatch",), "pbs": ("qsub", "qselect")}
"""Which are on PATH if the system is installed here."""
# The shell that salloc starts on the login node has the first variable alone.
_VARIABLES = {
    "slurm": {"SLURM_JOB_ID", "SLURMD_NODENAME"},
    "pbs": {"PBS_JOBID", "PBS_NODEFILE"},
}
"""Which are set on compute nodes of the system."""


def get_scheduler(name: str) -> Scheduler:
    """The batch system called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in _KINDS:
        raise UsageError(
            f"launch.scheduler: no scheduler {name!r}{did_you_mean(name, _KINDS)}",
            cure=f"choose one of {', '.join(_KINDS)}",
        )
    scheduler: Scheduler = getattr(import_module(f"{__name__}.{name}"), _KINDS[name])()
    return scheduler


def find_scheduler() -> str:
    """Name of the batch system that is installed here, else ``local``."""
    installed = (name for name, words in _COMMANDS.items() if all(map(shutil.which, words)))
    return next(installed, LOCAL)


def allocation() -> str:
    """Name of the batch system on whose compute node this process runs, else ``local``."""
    return next((name for name, names in _VARIABLES.items() if names <= os.environ.keys()), LOCAL)
