"""`pipectl status`: how runs are doing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from pipectl.cli.console import note, output, say, say_json
from pipectl.cli.options import RUNS, Json, RunsDirectory
from pipectl.errors import UnknownRunError


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run, a part of its name, or 'last'.")
    ] = None,
    directory: RunsDirectory = RUNS,
    limit: Annotated[int, typer.Option(min=1, help="How many runs to list, newest last.")] = 20,
    as_json: Json = False,
) -> None:
    """Show all runs, or everything about one."""
    if name is None:
        _all(directory, limit, as_json)
    else:
        _one(directory, name, as_json)


def _all(directory: Path, limit: int, as_json: bool) -> None:
    from pipectl.cli.status_view import runs_table, status_json
    from pipectl.jobs.status import statuses
    from pipectl.runs import list_runs

    runs = list_runs(directory)
    found = statuses(runs[-limit:], time.time())
    if as_json:
        say_json([status_json(status) for status in found])
    elif not found:
        say(f"{directory}: no runs yet; start one with: pipectl submit JOB.yaml")
    else:
        console = output()
        console.print(runs_table(found, console.width))
        if len(runs) > limit:
            note(f"{len(runs) - limit} older runs are not shown; see --limit")


def _one(directory: Path, name: str, as_json: bool) -> None:
    from pipectl.batch import JobState
    from pipectl.cli.status_view import show_run, status_json
    from pipectl.jobs.status import status
    from pipectl.runs import find_run

    found = status(find_run(directory, name), time.time())
    if as_json:
        say_json(status_json(found))
    else:
        show_run(found)
    if found.job.state is JobState.UNKNOWN:
        raise typer.Exit(UnknownRunError.exit_code)
