"""Where files lie before a job is submitted, and on which scheduler it goes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

LOCAL = "local"


def profile_path(spec: JobSpec) -> Path:
    """``runs/<name>.profile.json``."""
    return Path(spec.output.directory) / f"{spec.name}.profile.json"


def plan_path(spec: JobSpec) -> Path:
    """``runs/<name>.plan.json``."""
    return Path(spec.output.directory) / f"{spec.name}.plan.json"


def scheduler_name(spec: JobSpec, wanted: str | None) -> str:
    """The scheduler asked for, else the spec's; ``auto`` is Slurm where it is installed."""
    name: str = wanted or spec.launch.scheduler
    if name != "auto":
        return name
    return "slurm" if shutil.which("sbatch") else LOCAL
