"""pipectl: pipeline-parallel training of any PyTorch model over MPI and a batch scheduler."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipectl.api import Best, Job, Plan, Run, runs
    from pipectl.errors import (
        CaptureError,
        DataFileError,
        FaultError,
        InfeasibleError,
        InvalidInputError,
        MismatchError,
        OutOfTimeError,
        PipectlError,
        ScheduleError,
        SchedulerError,
        SpecError,
        UnknownRunError,
        UsageError,
        WorkerError,
    )
    from pipectl.profile import Profile

__version__ = "0.2.0"
__all__ = [
    "Best", "CaptureError", "DataFileError", "FaultError", "InfeasibleError", "InvalidInputError",
    "Job", "MismatchError", "OutOfTimeError", "PipectlError", "Plan", "Profile", "Run",
    "ScheduleError", "SchedulerError", "SpecError", "UnknownRunError", "UsageError", "WorkerError",
    "runs",
]  # fmt: skip
_ELSEWHERE = {**dict.fromkeys(("Best", "Job", "Plan", "Run", "runs"), "api"), "Profile": "profile"}
"""Modules of names; the others are exceptions. They are imported when they are asked for."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pipectl' has no attribute {name!r}")
    return getattr(import_module(f"pipectl.{_ELSEWHERE.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
