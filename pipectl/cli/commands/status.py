"""`pipectl status`: how runs are doing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli.console import note, output, say, say_json
from pipectl.cli.options import RUNS, Json, RunNames, RunsDirectory
from pipectl.errors import UnknownRunError, UsageError

if TYPE_CHECKING:
    from pipectl.jobs.state import RunStatus
    from pipectl.runs import RunDirectory, SweepDirectory


def command(
    names: RunNames = None,
    directory: RunsDirectory = RUNS,
    limit: Annotated[int, typer.Option(min=1, help="Runs to list at most, newest last.")] = 20,
    ranks: Annotated[bool, typer.Option("--ranks", help="Every rank of a run in a table.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="On the whole screen, until it is over or Ctrl-C.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the newest runs, or everything about one."""
    from pipectl.cli.views import live
    from pipectl.cli.views import run as view
    from pipectl.jobs.state import get_statuses
    from pipectl.runs import RunDirectory, find, find_runs, list_runs

    if watch and as_json:
        raise UsageError("--watch and --json exclude each other", cure="leave one out")
    if ranks and len(names or ()) != 1:
        raise UsageError("--ranks: of which run?", cure="name one, or write `last`")
    if names and len(names) == 1:
        one = find(directory, names[0])
        if isinstance(one, RunDirectory):
            _show_run(one, as_json=as_json, ranks=ranks, watch=watch)
        else:
            _show_sweep(one, as_json=as_json, ranks=ranks, watch=watch)
        return
    runs = find_runs(directory, names or ())
    if watch:
        live.watch_runs(directory, runs, limit)
        return
    every = runs or list_runs(directory)
    shown = get_statuses(runs or every[-limit:], time.time())
    if as_json:
        say_json([view.run_json(status) for status in shown])
    elif not shown:
        say(f"{directory}: no runs yet; start one with: pipectl submit JOB.yaml")
    else:
        console = output()
        console.print(view.runs_table(shown, console.width))
        if len(every) > len(shown):
            note(f"{len(every) - len(shown)} older runs are not shown; see --limit")
    if names:
        _exit_if_unknown(shown)


def _show_run(run: RunDirectory, *, as_json: bool, ranks: bool, watch: bool) -> None:
    from pipectl.cli.views import live
    from pipectl.cli.views import run as view
    from pipectl.jobs.state import get_status

    status = live.watch_run(run) if watch else get_status(run, time.time())
    view.print_run(status, as_json=as_json)
    if ranks and not as_json:
        output().print(view.ranks_table(status))
    _exit_if_unknown([status])


def _show_sweep(sweep: SweepDirectory, *, as_json: bool, ranks: bool, watch: bool) -> None:
    from pipectl.cli.views import live
    from pipectl.cli.views import run as view
    from pipectl.jobs.state import get_statuses
    from pipectl.runs import one_of

    if ranks:
        raise UsageError("--ranks: of which run?", cure=f"name it: {one_of(sweep)}, say")
    if watch:
        live.watch_sweep(sweep)
    statuses = get_statuses(sweep.runs(), time.time())
    view.print_sweep(sweep, statuses, as_json=as_json)
    _exit_if_unknown(statuses)


def _exit_if_unknown(statuses: Sequence[RunStatus]) -> None:
    from pipectl.batch import JobState

    if any(status.job.state is JobState.UNKNOWN for status in statuses):
        raise typer.Exit(UnknownRunError.exit_code)
