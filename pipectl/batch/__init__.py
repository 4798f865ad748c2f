"""Batch systems behind one protocol: render a script, submit, query, cancel, estimate.

The module of a batch system is imported when it is used.
"""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from typing import NamedTuple, cast

from pipectl.batch.limits import Queue
from pipectl.batch.process import TIMEOUT_S
from pipectl.batch.request import CHECKPOINTED, Array, JobRequest, Template
from pipectl.batch.scheduler import (
    QUEUES_TIMEOUT_S,
    JobState,
    JobStatus,
    OtherSystemError,
    Scheduler,
)
from pipectl.errors import UsageError
from pipectl.units import did_you_mean

LOCAL = "local"
__all__ = [
    "CHECKPOINTED", "LOCAL", "QUEUES_TIMEOUT_S", "Array", "JobRequest", "JobState", "JobStatus",
    "OtherSystemError", "Queue", "Scheduler", "Template", "allocation", "find_scheduler",
    "get_scheduler",
]  # fmt: skip


class _System(NamedTuple):
    """A batch system.

    Args:
        class_name: its class, in the module with its name.
        programs: are on PATH if the system is installed.
        node_variables: environment variables that are all set on its compute nodes.
    """

    class_name: str
    programs: tuple[str, ...] = ()
    node_variables: frozenset[str] = frozenset()


_SYSTEMS = {
    LOCAL: _System("LocalScheduler"),
    # Slurm is looked for first, because it may come with wrappers named as the commands of PBS.
    # The shell of salloc on a login node has only SLURM_JOB_ID.
    "slurm": _System("SlurmScheduler", ("sbatch",), frozenset({"SLURM_JOB_ID", "SLURMD_NODENAME"})),
    "pbs": _System("PbsScheduler", ("qsub", "qselect"), frozenset({"PBS_JOBID", "PBS_NODEFILE"})),
}


def get_scheduler(name: str, timeout_s: float = TIMEOUT_S) -> Scheduler:
    """Return a batch system by name.

    Args:
        timeout_s: time limit of each of its commands.

    Raises:
        UsageError: there is no such system.
    """
    if name not in _SYSTEMS:
        raise UsageError(
            f"launch.scheduler: no scheduler {name!r}{did_you_mean(name, _SYSTEMS)}",
            cure=f"choose one of {', '.join(_SYSTEMS)}",
        )
    module = import_module(f"{__name__}.{name}")
    system = cast(Scheduler, getattr(module, _SYSTEMS[name].class_name)())
    system.timeout_s = timeout_s
    return system


def find_scheduler() -> str:
    """Return the name of the installed batch system, otherwise ``local``."""
    for name, system in _SYSTEMS.items():
        if system.programs and all(map(shutil.which, system.programs)):
            return name
    return LOCAL


def allocation() -> str:
    """Return the name of the batch system of this compute node; elsewhere ``local``."""
    for name, system in _SYSTEMS.items():
        if system.node_variables and system.node_variables <= os.environ.keys():
            return name
    return LOCAL
