"""Where the files of a job lie before it is submitted, and which batch system takes it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import get
from pipectl.errors import SchedulerError

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

AUTO, LOCAL = "auto", "local"
_TITLES = {"slurm": "Slurm", "pbs": "PBS"}


def profile_path(spec: JobSpec, base: Path | None = None) -> Path:
    """``runs/<name>.profile.json``.

    Args:
        base: instead of the spec's output directory, here and for the other files.
    """
    return (base or Path(spec.output.directory)) / f"{spec.name}.profile.json"


def plan_path(spec: JobSpec, base: Path | None = None) -> Path:
    """``runs/<name>.plan.json``."""
    return (base or Path(spec.output.directory)) / f"{spec.name}.plan.json"


def cluster_path(spec: JobSpec, base: Path | None = None) -> Path:
    """``runs/<name>.cluster.json``, where measured links are."""
    return (base or Path(spec.output.directory)) / f"{spec.name}.cluster.json"


def scheduler_name(spec: JobSpec, scheduler: str | None) -> str:
    """The scheduler asked for, else the spec's; ``auto`` is Slurm or PBS if it is installed."""
    name: str = scheduler or spec.launch.scheduler
    return name if name != AUTO else detect_scheduler()


def detect_scheduler() -> str:
    """The batch system that is installed here, else ``local``.

    Slurm comes with commands named as those of PBS, so that it is looked for first.
    """
    if shutil.which("sbatch"):
        return "slurm"
    return "pbs" if shutil.which("qsub") and shutil.which("qselect") else LOCAL


def check_answering(spec: JobSpec, scheduler: str | None) -> None:
    """Ask a batch system that nobody named whether it is there: its commands may be all there is.

    Args:
        scheduler: the one asked for; None if the spec decides.

    Raises:
        SchedulerError: it does not answer.
    """
    if (scheduler or spec.launch.scheduler) != AUTO or (name := detect_scheduler()) == LOCAL:
        return
    try:
        get(name).find("answering?")
    except SchedulerError as error:
        raise SchedulerError(
            f"{_TITLES[name]} is installed here, but does not answer: "
            f"{error.message.splitlines()[-1]}",
            cure="to train on this machine: --scheduler local\n"
            f"to submit all the same: --scheduler {name}",
        ) from error
