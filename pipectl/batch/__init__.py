"""Batch systems behind one protocol: render a script, submit, query, cancel, estimate."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from pipectl.batch.launchers import MpiChoice, choose_mpi, launch_command
from pipectl.batch.local import LocalScheduler
from pipectl.batch.pbs import PbsScheduler
from pipectl.batch.protocol import (
    Array,
    JobRequest,
    JobState,
    JobStatus,
    Queue,
    Scheduler,
    Template,
)
from pipectl.batch.resolve import Evidence, resolve
from pipectl.batch.script import CHECKPOINTED, check_template, render_script, render_variables
from pipectl.batch.slurm import SlurmScheduler
from pipectl.errors import UsageError
from pipectl.units import did_you_mean

_SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "local": LocalScheduler,
    "slurm": SlurmScheduler,
    "pbs": PbsScheduler,
}
LOCAL = "local"
_COMMANDS = {"slurm": ("sbatch",), "pbs": ("qsub", "qselect")}
"""Slurm comes with commands named as those of PBS, so that it is looked for first."""
_ON_COMPUTE_NODES = {
    "slurm": ("SLURM_JOB_ID", "SLURMD_NODENAME"),
    "pbs": ("PBS_JOBID", "PBS_NODEFILE"),
}
"""Variables; the shell that salloc starts on the login node has the first alone."""

__all__ = [
    "CHECKPOINTED", "LOCAL", "Array", "Evidence", "JobRequest", "JobState", "JobStatus",
    "MpiChoice", "Queue", "Scheduler", "Template", "allocation", "check_template", "choose_mpi",
    "find_scheduler", "get_scheduler", "launch_command", "render_script", "render_variables",
    "resolve",
]  # fmt: skip


def get_scheduler(name: str) -> Scheduler:
    """The batch system called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in _SCHEDULERS:
        raise UsageError(
            f"launch.scheduler: no scheduler {name!r}{did_you_mean(name, _SCHEDULERS)}",
            cure=f"choose one of {', '.join(_SCHEDULERS)}",
        )
    return _SCHEDULERS[name]()


def find_scheduler() -> str:
    """Name of the batch system that is installed here, else ``local``."""
    names = (name for name, commands in _COMMANDS.items() if all(map(shutil.which, commands)))
    return next(names, LOCAL)


def allocation() -> str:
    """Name of the batch system on whose compute node this process runs, else ``local``."""
    names = (name for name, keys in _ON_COMPUTE_NODES.items() if os.environ.keys() >= set(keys))
    return next(names, LOCAL)
