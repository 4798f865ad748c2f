"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from pipectl.files import RUNS_VARIABLE
from pipectl.runs import list_runs, list_sweeps, runs_directory

T = TypeVar("T")


def read_by(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser whose complaint, a ValueError, is a wrong command line."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return read


def above_zero(parse: Callable[[str], int]) -> Callable[[str], int]:
    """A parser of sizes or durations for which 0 is none."""

    def read(text: str) -> int:
        found = parse(text)
        if found < 1:
            raise ValueError("must be more than 0")
        return found

    return read


JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job spec.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one field: training.steps=10."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunsDirectory = Annotated[
    Path,
    typer.Option("--directory", "-d", envvar=RUNS_VARIABLE, help="Where the run directories are."),
]
TrustOwner = Annotated[
    bool, typer.Option("--trust-owner", help="Run code that other users could have written.")
]
RUNS = Path("runs")
RUN_HELP = "Run name or the start or end of it, path, job id, or 'last'."


def names_of_runs(context: typer.Context, incomplete: str) -> list[str]:
    """What a shell offers where a run is to be named: ``last``, sweeps and runs, newest first."""
    directory = context.params.get("directory") or runs_directory()
    sweeps = (sweep.name for sweep in reversed(list_sweeps(Path(directory))))
    names = ["last", *sweeps, *(run.name for run in reversed(list_runs(Path(directory))))]
    return [name for name in names if name.startswith(incomplete)]


RunName = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=names_of_runs)]
RunNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN]...", help=RUN_HELP, autocompletion=names_of_runs),
]


class SchedulerName(StrEnum):
    """Where a job can run."""

    LOCAL = "local"
    SLURM = "slurm"
    PBS = "pbs"


SchedulerOption = Annotated[
    SchedulerName | None, typer.Option("--scheduler", help="Instead of the spec's own.")
]
