"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from pipectl.errors import UsageError
from pipectl.files import RUNS_VARIABLE
from pipectl.runs import list_runs, list_sweeps, runs_directory
from pipectl.units import parse_bytes, parse_walltime

T = TypeVar("T", int, float)
_MAX_VALUE = 1e100
"""Of which sums are finite."""


def reader(parse: Callable[[str], T], *, zero: bool = False) -> Callable[[str], T]:
    """A parser of an option's value; what ``parse`` complains of, a ValueError, is a usage error.

    Args:
        zero: whether the value may be 0.
    """

    def read(text: str) -> T:
        try:
            value = parse(text)
            if not (value > 0 or (zero and value == 0)):
                raise ValueError(f"must be {'at least' if zero else 'more than'} 0, not {text}")
            if value > _MAX_VALUE:
                raise ValueError(f"must be at most {_MAX_VALUE:g}, not {text}")
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return value

    return read


def parse_number(text: str) -> float:
    """A number.

    Raises:
        ValueError: it is none.
    """
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def parse_whole_number(text: str) -> int:
    """A whole number.

    Raises:
        ValueError: it is none.
    """
    if not text.strip().isdecimal():
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def flag(text: str, *names: str) -> Any:
    """An option without a value, or of an enumeration; ``text`` is its help."""
    return typer.Option(*names, help=text)


def count(text: str, *names: str, **more: Any) -> Any:
    """An option whose value is a whole number, by default at least 1."""
    return typer.Option(*names, metavar="N", help=text, **{"min": 1, **more})


def option(metavar: str, text: str, *names: str, **more: Any) -> Any:
    """An option with a value, which the help calls ``metavar``."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


read_size = reader(parse_bytes)
read_walltime = reader(parse_walltime)


def refuse(options: Mapping[str, object], why: str, *, cure: str | None = None) -> None:
    """Refuse options that cannot be combined with others.

    Args:
        options: by their names; None, False and what is empty was not given.

    Raises:
        UsageError: naming the first that was given.
    """
    for name, value in options.items():
        if value or (isinstance(value, int | float) and value is not False):  # 0 was given
            raise UsageError(f"{name}: {why}", cure=cure)


def names_of_runs(context: typer.Context, incomplete: str) -> list[str]:
    """What a shell offers where a run is to be named: ``last``, sweeps and runs, newest first."""
    directory = Path(context.params.get("directory") or runs_directory())
    runs = [*reversed(list_sweeps(directory)), *reversed(list_runs(directory))]
    names = ["last", *(run.name for run in runs)]
    return [name for name in names if name.startswith(incomplete)]


class SchedulerName(StrEnum):
    """Batch systems, and this machine."""

    LOCAL = "local"
    SLURM = "slurm"
    PBS = "pbs"


RUNS = Path("runs")
RUN_HELP = "Run name (or its start or end), path, job id, or 'last'."

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job spec.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key of the job: training.steps=10."),
]
SchedulerOption = Annotated[
    SchedulerName | None,
    typer.Option("--scheduler", help="Where the job runs; by default launch.scheduler."),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=names_of_runs)]
RunNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN]...", help=RUN_HELP, autocompletion=names_of_runs),
]
RunsDirectory = Annotated[
    Path,
    typer.Option(
        "--directory",
        "-d",
        metavar="DIRECTORY",
        envvar=RUNS_VARIABLE,
        help="Directory of the runs.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")]
TrustOwner = Annotated[
    bool, typer.Option("--trust-owner", help="Run code that other users can write to.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
