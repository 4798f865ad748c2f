"""Batch systems behind one protocol: render a script, submit, query, cancel, estimate."""

from __future__ import annotations

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

__all__ = [
    "CHECKPOINTED", "Array", "Evidence", "JobRequest", "JobState", "JobStatus", "MpiChoice",
    "Queue", "Scheduler", "Template", "check_template", "choose_mpi", "get", "launch_command",
    "render_script", "render_variables", "resolve",
]  # fmt: skip


def get(name: str) -> Scheduler:
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
