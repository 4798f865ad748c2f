"""Batch systems behind one protocol: render a script, submit, query, cancel, estimate.

A batch system's module, and what renders scripts, are imported when they are used.
"""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from typing import NamedTuple

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


class _System(NamedTuple):
    """A batch system.

    Args:
        kind: name of its class, in the module of this package that is called as the system.
        commands: which are on PATH if it is installed here.
        variables: which are set on its compute nodes.
    """

    kind: str
    commands: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


_SYSTEMS = {
    LOCAL: _System("LocalScheduler"),
    # Slurm comes with commands named as those of PBS, so that it is looked for first. The shell
    # that salloc starts on the login node has the first variable alone.
    "slurm": _System("SlurmScheduler", ("sbatch",), ("SLURM_JOB_ID", "SLURMD_NODENAME")),
    "pbs": _System("PbsScheduler", ("qsub", "qselect"), ("PBS_JOBID", "PBS_NODEFILE")),
}


def get_scheduler(name: str) -> Scheduler:
    """The batch system called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in _SYSTEMS:
        raise UsageError(
            f"launch.scheduler: no scheduler {name!r}{did_you_mean(name, _SYSTEMS)}",
            cure=f"choose one of {', '.join(_SYSTEMS)}",
        )
    scheduler: Scheduler = getattr(import_module(f"{__name__}.{name}"), _SYSTEMS[name].kind)()
    return scheduler


def find_scheduler() -> str:
    """Name of the batch system that is installed here, else ``local``."""
    for name, system in _SYSTEMS.items():
        if system.commands and all(map(shutil.which, system.commands)):
            return name
    return LOCAL


def allocation() -> str:
    """Name of the batch system on whose compute node this process runs, else ``local``."""
    for name, system in _SYSTEMS.items():
        if system.variables and os.environ.keys() >= set(system.variables):
            return name
    return LOCAL
