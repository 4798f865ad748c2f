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
from pipectl.cli.options import RUNS, Json, RunNames, RunsDirectory
from pipectl.cli.screen import watch
from pipectl.cli.views.run import (
    print_run,
    print_sweep,
    ranks_table,
    run_json,
    run_picture,
    runs_table,
    sweep_picture,
)
from pipectl.errors import UnknownRunError, UsageError
from pipectl.jobs.state import RunStatus, get_status, get_statuses
from pipectl.runs import RunDirectory, SweepDirectory, find, find_runs, list_runs, one_of


def command(
    names: RunNames = None,
    directory: RunsDirectory = RUNS,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of runs to list.")
    ] = 20,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Show a table of the ranks of a run.")
    ] = False,
    watching: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Full-screen view until the run ends or Ctrl-C."),
    ] = False,
    as_json: Json = False,
) -> None:
    if watching and as_json:
        raise UsageError("--watch and --json: choose one")
    if ranks and len(names or ()) != 1:
        raise UsageError("--ranks: needs one run", cure="name it, or write `last`")
    if not names or len(names) > 1:
        runs = find_runs(directory, names or ())
        statuses = _show_list(directory, runs, limit, as_json=as_json, watching=watching)
    elif isinstance(one := find(directory, names[0]), RunDirectory):
        statuses = _show_run(one, as_json=as_json, ranks=ranks, watching=watching)
    elif ranks:
        raise UsageError("--ranks: needs one run", cure=f"name it: {one_of(one)}, say")
    else:
        statuses = _show_sweep(one, as_json=as_json, watching=watching)
    if names and any(status.job.state is JobState.UNKNOWN for status in statuses):
        raise typer.Exit(UnknownRunError.exit_code)


def _show_run(
    run: RunDirectory, *, as_json: bool, ranks: bool, watching: bool
) -> Sequence[RunStatus]:
    if watching:
        watch(lambda _: [run], lambda seen, *room: run_picture(seen[0], *room), ends=True)
    status = get_status(run, time.time())
    print_run(status, as_json=as_json)
    if ranks and not as_json:
        console = output()
        console.print(ranks_table(status, width=console.width))
    return [status]


def _show_sweep(sweep: SweepDirectory, *, as_json: bool, watching: bool) -> Sequence[RunStatus]:
    if watching:
        watch(lambda _: sweep.runs(), partial(sweep_picture, sweep), ends=True)
    statuses = get_statuses(sweep.runs(), time.time())
    print_sweep(sweep, statuses, as_json=as_json)
    return statuses


def _show_list(
    directory: Path, runs: Sequence[RunDirectory], limit: int, *, as_json: bool, watching: bool
) -> Sequence[RunStatus]:
    """A table of runs.

    Args:
        runs: empty for the newest of the directory, with those that are submitted meanwhile.
        limit: how many of these at most.
    """

    def draw(seen: Sequence[RunStatus], width: int, _height: int) -> RenderableType:
        return runs_table(seen, width) if seen else plain(f"{directory}: no runs yet")

    if watching:
        watch(
            lambda room: (runs or list_runs(directory))[-min(room, limit) :],
            draw,
            ends=bool(runs),
        )
    every = runs or list_runs(directory)
    statuses = get_statuses(runs or every[-limit:], time.time())
    console = output()
    if as_json:
        say_json([run_json(status) for status in statuses])
    elif not statuses:
        say(f"{directory}: no runs yet; start one with: pipectl submit JOB.yaml")
    else:
        console.print(runs_table(statuses, console.width))
        if len(every) > len(statuses):
            note(f"{len(every) - len(statuses)} older runs are not shown; see --limit")
    return statuses
