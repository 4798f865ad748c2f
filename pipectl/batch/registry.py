"""The batch systems by name."""

from __future__ import annotations

from collections.abc import Callable

from pipectl.batch.local import LocalScheduler
from pipectl.batch.pbs import PbsScheduler
from pipectl.batch.protocol import Scheduler
from pipectl.batch.slurm import SlurmScheduler
from pipectl.errors import UsageError
from pipectl.units import did_you_mean

_KNOWN: dict[str, Callable[[], Scheduler]] = {
    "local": LocalScheduler,
    "slurm": SlurmScheduler,
    "pbs": PbsScheduler,
}
NAMES = tuple(_KNOWN)


def get(name: str) -> Scheduler:
    """The batch system called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in _KNOWN:
        raise UsageError(
            f"launch.scheduler: no scheduler {name!r}{did_you_mean(name, NAMES)}",
            cure=f"choose one of {', '.join(NAMES)}",
        )
    return _KNOWN[name]()
