"""Batch systems behind one protocol: render a script, submit, query, cancel, estimate."""

from __future__ import annotations

from collections.abc import Callable

from pipectl.batch.launchers import (
    AUTO,
    MPIEXECS,
    MpiChoice,
    choose_mpi,
    find_mpiexec,
    knows_pmi,
    launch_command,
    list_pmis,
)
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
NAMES = tuple(_SCHEDULERS)

__all__ = [
    "AUTO",
    "CHECKPOINTED",
    "MPIEXECS",
    "NAMES",
    "Array",
    "Evidence",
    "JobRequest",
    "JobState",
    "JobStatus",
    "MpiChoice",
    "Queue",
    "Scheduler",
    "Template",
    "check_template",
    "choose_mpi",
    "find_mpiexec",
    "get",
    "knows_pmi",
    "launch_command",
    "list_pmis",
    "render_script",
    "render_variables",
    "resolve",
]


def get(name: str) -> Scheduler:
    """The batch system called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in _SCHEDULERS:
        raise UsageError(
            f"launch.scheduler: no scheduler {name!r}{did_you_mean(name, NAMES)}",
            cure=f"choose one of {', '.join(NAMES)}",
        )
    return _SCHEDULERS[name]()
