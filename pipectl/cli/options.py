"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import typer

from pipectl.cluster import MAX_RANKS
from pipectl.directives import SCHEDULERS, packaged_schedulers
from pipectl.errors import UsageError
from pipectl.files import RUNS_VARIABLE
from pipectl.runs import list_runs, list_sweeps, runs_directory
from pipectl.units import NodeRange, parse_bytes, parse_walltime

T = TypeVar("T", int, float)
_MAX_VALUE = 1e100
"""Sums of such values are finite."""


def reader(parse: Callable[[str], T], *, zero: bool = False) -> Callable[[str], T]:
    """A parser of an option's value that turns a ValueError of ``parse`` into a usage error.

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
    """Parse a number, or raise a ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def flag(text: str, *names: str, default: Any = False) -> Any:
    """An option without a value, or with one of several words; ``text`` is its help."""
    return typer.Option(default, *names, help=text)


def count(text: str, *names: str, default: int | None = None, **more: Any) -> Any:
    """An option whose value is a whole number, at least 1 by default."""
    return typer.Option(default, *names, metavar="N", help=text, **{"min": 1, **more})


def value(metavar: str, text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """An option with a value that the help calls ``metavar``."""
    return typer.Option(default, *names, metavar=metavar, help=text, **more)


def read_nodes(text: str) -> int | str:
    """The value of ``--nodes``: a number, or the text of a range."""
    try:
        if "-" in text[1:]:
            return str(NodeRange.parse(text))
        if text.isdecimal() and int(text):
            return int(text)
        raise ValueError(f"{text!r} is not a number of nodes; write for example 4 or 2-8")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def read_node_counts(texts: Sequence[str] | None) -> tuple[int, ...] | None:
    """Parse the values of ``--compare``, such as ``1,2,4``; None if there are none.

    Raises:
        UsageError: a text is not a list of numbers.
    """
    if not texts:
        return None
    text = ",".join(texts)
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--compare: {text!r} is not a list of numbers", hint="write for example 1,2,4"
        ) from None
    if not all(0 < number <= MAX_RANKS for number in counts):
        raise UsageError(f"--compare: {text!r}: each must be from 1 to {MAX_RANKS:,}")
    return counts


read_size = reader(parse_bytes)


def check_walltime(text: str) -> str:
    """The text of an option if it is a walltime: whether it has a unit may matter."""
    reader(parse_walltime)(text)
    return text


def refuse(context: typer.Context, names: str, why: str, *, hint: str | None = None) -> None:
    """Refuse options that cannot be combined with others.

    Args:
        names: options, with spaces between them.

    Raises:
        UsageError: one of them is on the command line.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        for name in {*parameter.opts, parameter.metavar} & set(names.split()):
            if source is not None and source.name == "COMMANDLINE":
                raise UsageError(f"{name}: {why}", hint=hint)


def names_of_runs(context: typer.Context, incomplete: str) -> list[str]:
    """Completions for the name of a run: ``last``, sweeps and runs, newest first."""
    directory = Path(context.params.get("directory") or runs_directory())
    runs = [*reversed(list_sweeps(directory)), *reversed(list_runs(directory))]
    names = ["last", *(run.name for run in runs)]
    return [name for name in names if name.startswith(incomplete)]


def names_of_schedulers(incomplete: str) -> list[str]:
    """Completions for the name of a batch system."""
    names = (*SCHEDULERS, *packaged_schedulers())
    return [name for name in names if name.startswith(incomplete)]


RUN_HELP = "Run name (or its start or end), path, job id, or 'last'."

JOB_FILE: Any = typer.Argument(..., metavar="JOB.yaml", help="The job spec.")
OVERRIDES = value(
    "KEY=VALUE",
    "Set one key of the job: training.steps=10. What follows after `--` sets script.arguments.",
    "--set",
)
SCHEDULER = value(
    "NAME", f"Where the job runs: {', '.join(SCHEDULERS)}; by default launch.scheduler.",
    "--scheduler", autocompletion=names_of_schedulers,
)  # fmt: skip
NODES = value(
    "N", "Number of nodes, or a range such as 2-8 (resources.nodes).", "-N", "--nodes",
    parser=read_nodes,
)  # fmt: skip
_NAMED: Any = {"metavar": "RUN", "help": RUN_HELP, "autocompletion": names_of_runs}
RUN, LAST_RUN = typer.Argument(..., **_NAMED), typer.Argument("last", **_NAMED)
OTHER_RUN = typer.Argument(
    None, metavar="OTHER", help="Another run, to compare with.", autocompletion=names_of_runs
)
RUN_NAMES = typer.Argument(None, **_NAMED)
DIRECTORY = value(
    "DIRECTORY", "Directory of the runs.", "--directory", "-d",
    default=Path("runs"), envvar=RUNS_VARIABLE,
)  # fmt: skip
WAIT = flag("Follow the run to its end.", "--wait")
TRUST_OWNER = flag("Run code that other users can write to.", "--trust-owner")
JSON = flag("Print JSON, for programs.", "--json")
