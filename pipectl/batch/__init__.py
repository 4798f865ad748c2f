"""Batch systems behind one protocol: render a script, submit, query, cancel, estimate.

The module of a batch system is imported when it is used.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipectl.batch.limits import Queue
from pipectl.batch.process import TIMEOUT_S, NoAnswerError
from pipectl.batch.request import CHECKPOINTED, Array, JobRequest
from pipectl.batch.scheduler import (
    QUEUES_TIMEOUT_S,
    JobState,
    JobStatus,
    OtherSystemError,
    Scheduler,
)
from pipectl.directives import SCHEDULER_GROUP, packaged_schedulers
from pipectl.errors import UsageError
from pipectl.units import did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

LOCAL, HERE = "local", "here"
__all__ = [
    "CHECKPOINTED", "HERE", "LOCAL", "QUEUES_TIMEOUT_S", "Array", "JobRequest", "JobState",
    "JobStatus", "NoAnswerError",
    "OtherSystemError", "Queue", "Scheduler", "find_scheduler", "get_scheduler",
    "queued_systems", "scheduler_class", "system_of_this_node",
]  # fmt: skip


_SYSTEMS = {
    LOCAL: "LocalScheduler",
    HERE: "HereScheduler",
    "slurm": "SlurmScheduler",
    "pbs": "PbsScheduler",
}
"""The class of each batch system, in the module of its name."""
_QUEUED = ("slurm", "pbs")
"""Slurm is looked for first, because it may come with wrappers named as the commands of PBS."""


@cache
def scheduler_class(name: str) -> type[Scheduler]:
    """Return the class of a batch system: pipectl's own, or that of an installed package.

    Raises:
        UsageError: there is no such system, or the package's class cannot be used.
    """
    if name in _SYSTEMS:
        own: type[Scheduler] = getattr(import_module(f"{__name__}.{name}"), _SYSTEMS[name])
        return own
    from importlib.metadata import entry_points

    found = tuple(entry_points(group=SCHEDULER_GROUP, name=name))
    if not found:
        known = (*_SYSTEMS, *packaged_schedulers())
        raise UsageError(
            f"there is no batch system {name!r}{did_you_mean(name, known)}",
            hint=f"choose one of {', '.join(known)}, or install the package that adds it",
        )
    return _load(found[0])


def _load(entry: EntryPoint) -> type[Scheduler]:
    """Return the class that an entry point names."""
    found: Any = None
    try:
        found = entry.load()
        fault = "" if isinstance(found, type) and issubclass(found, Scheduler) else "is none"
        missing = [] if fault else sorted(found.__abstractmethods__)
        fault = fault or (f"lacks {', '.join(missing)}" if missing else "")
        if not fault and found.name != entry.name:
            fault = f"calls itself {found.name!r}"
    except Exception as error:  # it is code of another package
        fault = f"cannot be loaded: {type(error).__name__}: {error}"
    if fault:
        raise UsageError(
            f"the class of the batch system {entry.name!r}, {entry.value}, {fault}",
            hint="correct or remove the package that adds it; docs/extending.md shows a class",
        )
    loaded: type[Scheduler] = found
    return loaded


def get_scheduler(
    name: str,
    timeout_s: float = TIMEOUT_S,
    exit_codes: Mapping[str, int] = MappingProxyType({}),
) -> Scheduler:
    """Return a batch system by name.

    Args:
        timeout_s: time limit of each of its commands.
        exit_codes: that jobs have written, by id; see :attr:`Scheduler.exit_codes`.

    Raises:
        UsageError: see :func:`scheduler_class`.
    """
    system = scheduler_class(name)()
    system.timeout_s, system.exit_codes = timeout_s, exit_codes
    return system


def queued_systems() -> tuple[str, ...]:
    """Return the names of all systems with a queue, in the order in which they are looked for:
    whoever has installed a package for one has it."""
    return (*packaged_schedulers(), *_QUEUED)


def find_scheduler() -> str:
    """Return the name of the installed batch system, otherwise ``local``."""
    for name in queued_systems():
        programs = scheduler_class(name).programs
        if programs and all(map(shutil.which, programs)):
            return name
    return LOCAL


def system_of_this_node() -> str:
    """Return the name of the batch system of this compute node; elsewhere ``local``."""
    for name in queued_systems():
        variables = scheduler_class(name).node_variables
        if variables and variables <= os.environ.keys():
            return name
    return LOCAL
