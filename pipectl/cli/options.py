"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job spec.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one field: training.steps=10."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunsDirectory = Annotated[
    Path, typer.Option("--directory", "-d", help="Where the run directories are.")
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run: its name, a part, or 'last'.")]
RUNS = Path("runs")


class SchedulerName(StrEnum):
    """Where a job can run."""

    LOCAL = "local"
    SLURM = "slurm"
    PBS = "pbs"


SchedulerOption = Annotated[
    SchedulerName | None, typer.Option("--scheduler", help="Instead of the spec's own.")
]
