"""`pipectl status`: how runs are doing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli.console import output
from pipectl.cli.options import RUNS, Json, RunsDirectory, names_of_runs
from pipectl.errors import UnknownRunError, UsageError

if TYPE_CHECKING:
    from pipectl.runs import SweepDirectory


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run, a part of its name, 'last', or a sweep.",
            autocompletion=names_of_runs,
        ),
    ] = None,
    directory: RunsDirectory = RUNS,
    limit: Annotated[int, typer.Option(min=1, help="How many runs to list, newest last.")] = 20,
    ranks: Annotated[bool, typer.Option("--ranks", help="Every rank of a run in a table.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="On the whole screen, until it is over or Ctrl-C.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show all runs, or everything about one."""
    if watch and as_json:
        raise UsageError("--watch and --json exclude each other", cure="leave one out")
    if ranks and name is None:
        raise UsageError("--ranks: of which run?", cure="name it, or write `last`")
    if name is not None:
        _one(directory, name, as_json=as_json, ranks=ranks, watch=watch)
    elif watch:
        from pipectl.cli.status_watch import watch_all

        watch_all(directory, limit)
    else:
        from pipectl.cli.status_table import show_all

        show_all(directory, limit, as_json=as_json)


def _sweep(sweep: SweepDirectory, *, as_json: bool, ranks: bool, watch: bool) -> None:
    from pipectl.batch import JobState
    from pipectl.cli.status_sweep import show_sweep
    from pipectl.runs import one_of

    if ranks:
        raise UsageError("--ranks: of which run?", cure=f"name it: {one_of(sweep)}, say")
    if watch:
        from pipectl.cli.status_watch import watch_sweep

        watch_sweep(sweep)
    found = show_sweep(sweep, as_json=as_json)
    if any(status.job.state is JobState.UNKNOWN for status in found):
        raise typer.Exit(UnknownRunError.exit_code)


def _one(directory: Path, name: str, *, as_json: bool, ranks: bool, watch: bool) -> None:
    from pipectl.batch import JobState
    from pipectl.cli.status_view import show_run
    from pipectl.jobs.status import status
    from pipectl.runs import find_run, find_sweep

    sweep = find_sweep(directory, name)
    if sweep is not None:
        _sweep(sweep, as_json=as_json, ranks=ranks, watch=watch)
        return
    run = find_run(directory, name)
    if watch:
        from pipectl.cli.status_watch import watch_one

        found = watch_one(run)
    else:
        found = status(run, time.time())
    show_run(found, as_json=as_json)
    if ranks and not as_json:
        from pipectl.cli.ranks_view import ranks_table

        output().print(ranks_table(found))
    if found.job.state is JobState.UNKNOWN:
        raise typer.Exit(UnknownRunError.exit_code)
