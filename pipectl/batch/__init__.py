"""Batch systems behind one protocol: render a script, submit, query, cancel, estimate."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping

from pipectl.batch.local import LocalScheduler
from pipectl.batch.pbs import PbsScheduler
from pipectl.batch.request import Array, JobRequest, Template
from pipectl.batch.scheduler import CHECKPOINTED, JobState, JobStatus, Queue, Scheduler
from pipectl.batch.slurm import SlurmScheduler
from pipectl.errors import UsageError
from pipectl.units import did_you_mean

LOCAL = LocalScheduler.name
__all__ = [
    "CHECKPOINTED", "LOCAL", "Array", "JobRequest", "JobState", "JobStatus", "Queue", "Scheduler",
    "Template", "allocation", "find_scheduler", "get_scheduler",
]  # fmt: skip
# Slurm is looked for first, because it may come with wrappers named as the commands of PBS.
_SYSTEMS: Mapping[str, type[Scheduler]] = {
    system.name: system for system in (LocalScheduler, SlurmScheduler, PbsScheduler)
}


def get_scheduler(name: str) -> Scheduler:
    """Return a batch system by name.

    Raises:
        UsageError: there is no such system.
    """
    if name not in _SYSTEMS:
        raise UsageError(
            f"launch.scheduler: no scheduler {name!r}{did_you_mean(name, _SYSTEMS)}",
            cure=f"choose one of {', '.join(_SYSTEMS)}",
        )
    return _SYSTEMS[name]()


def find_scheduler() -> str:
    """Return the name of the installed batch system, otherwise ``local``."""
    return _name_of(lambda system: all(map(shutil.which, system.programs)))


def allocation() -> str:
    """Return the name of the batch system of this compute node; elsewhere ``local``."""
    return _name_of(lambda system: system.node_variables <= os.environ.keys())


def _name_of(is_here: Callable[[type[Scheduler]], bool]) -> str:
    others = (system for name, system in _SYSTEMS.items() if name != LOCAL)
    return next((system.name for system in others if is_here(system)), LOCAL)
