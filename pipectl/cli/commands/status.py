"""`pipectl status`: the state of runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from pipectl.batch import JobState
from pipectl.cli.console import note, output, plain, say, say_json
from pipectl.cli.options import RUNS, Json, RunNames, RunsDirectory, count, flag
from pipectl.cli.views import run as view
from pipectl.errors import UnknownRunError, UsageError
from pipectl.jobs.state import RunStatus, get_statuses
from pipectl.runs import RunDirectory, SweepDirectory, find, find_runs, list_runs, one_of


def command(
    names: RunNames = None,
    directory: RunsDirectory = RUNS,
    limit: Annotated[int, count("Maximum number of runs to list.")] = 20,
    ranks: Annotated[bool, flag("Show a table of the ranks of a run.", "--ranks")] = False,
    watching: Annotated[
        bool, flag("Full-screen view until the run ends or Ctrl-C.", "--watch", "-w")
    ] = False,
    as_json: Json = False,
) -> None:
    if watching and as_json:
        raise UsageError("--watch and --json: choose one")
    if ranks and len(names or ()) != 1:
        raise UsageError("--ranks: needs one run", cure="name it, or write `last`")
    one = find(directory, names[0]) if names and len(names) == 1 else None
    if ranks and isinstance(one, SweepDirectory):
        raise UsageError("--ranks: needs one run", cure=f"name it: {one_of(one)}, say")
    named = () if one is not None else find_runs(directory, names or ())

    def choose_runs(room: int | None = None) -> Sequence[RunDirectory]:
        """What was named, else the newest runs; of a list, as many as there is room for."""
        if one is not None:
            return [one] if isinstance(one, RunDirectory) else one.runs()
        runs = named or list_runs(directory)[-limit:]
        return runs if room is None else runs[-min(room, limit) :]

    if watching:
        from pipectl.cli.follow import watch

        watch(choose_runs, partial(_draw, one, directory), ends=bool(names))
    statuses = get_statuses(choose_runs(), time.time())
    if not statuses and not as_json:
        say(f"{directory}: no runs yet; start one with: pipectl submit JOB.yaml")
    _print(one, statuses, ranks=ranks, as_json=as_json)
    if not as_json and not names and (older := len(list_runs(directory)) - len(statuses)) > 0:
        note(f"{older} older runs are not shown; see --limit")
    if names and any(status.job.state is JobState.UNKNOWN for status in statuses):
        raise typer.Exit(UnknownRunError.exit_code)


def _print(
    one: RunDirectory | SweepDirectory | None,
    statuses: Sequence[RunStatus],
    *,
    ranks: bool,
    as_json: bool,
) -> None:
    """Print one run or sweep, or a list of runs."""
    if isinstance(one, SweepDirectory):
        view.print_sweep(one, statuses, as_json=as_json)
    elif one is not None:
        view.print_run(statuses[0], as_json=as_json)
    elif as_json:
        say_json([view.run_json(status) for status in statuses])
    elif statuses:
        output().print(view.runs_table(statuses, output().width))
    if ranks and not as_json:
        output().print(view.ranks_table(statuses[0], width=output().width))


def _draw(
    one: RunDirectory | SweepDirectory | None,
    directory: Path,
    statuses: Sequence[RunStatus],
    width: int,
    height: int,
) -> RenderableType:
    """The full screen: of one run or sweep, or of several runs."""
    if isinstance(one, RunDirectory):
        return view.run_picture(statuses[0], width, height)
    if isinstance(one, SweepDirectory):
        return view.sweep_picture(one, statuses, width, height)
    return view.runs_table(statuses, width) if statuses else plain(f"{directory}: no runs yet")
