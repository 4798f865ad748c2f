"""`pipectl status`: the state of runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Group, RenderableType

from pipectl.batch import JobState
from pipectl.cli import options as opt
from pipectl.cli.console import note, output, plain, say, show
from pipectl.cli.views import run as view
from pipectl.errors import UnknownRunError, UsageError
from pipectl.jobs.run_json import Subject
from pipectl.jobs.state import Poller, get_statuses
from pipectl.runs import RunDirectory, SweepDirectory, find, find_runs, list_runs, name_in_shell

_POLL_S = 0.5
_MARGIN = 4
"""Lines of the screen below a table."""
_MIN_PAUSE = 4
"""Minimum pause between two updates, relative to the duration of an update."""


def command(
    context: typer.Context,
    names: list[str] | None = opt.RUN_NAMES,
    directory: Path = opt.DIRECTORY,
    limit: int = opt.count("Maximum number of runs to list.", default=20),
    ranks: bool = opt.flag("Show a table of the ranks of a run.", "--ranks"),
    watching: bool = opt.flag("Full-screen view until the run ends or Ctrl-C.", "--watch", "-w"),
    as_json: bool = opt.JSON,
) -> None:
    if watching and as_json:
        raise UsageError("--watch and --json: choose one")
    if ranks and len(names or ()) != 1:
        raise UsageError("--ranks: needs one run", hint="name it, or write `last`")
    if names:
        opt.refuse(context, "--limit", "is not used with names of runs, which are all shown")
    one = find(directory, names[0]) if names and len(names) == 1 else None
    if ranks and isinstance(one, SweepDirectory):
        raise UsageError(
            "--ranks: needs one run", hint=f"name one, such as {name_in_shell(one.run(0))}"
        )
    runs = find_runs(directory, names or ())
    if watching:
        _watch(one, runs, directory, limit)
    known = runs if names else list_runs(directory)
    runs = runs if names else known[-limit:]
    statuses = get_statuses(runs, time.time())
    if not runs and one is None and not as_json:
        say(f"{directory}: no runs yet; start one with: pipectl submit JOB.yaml")
    else:
        view.print_runs(one, statuses, as_json=as_json)
    if ranks and not as_json:
        show(view.ranks_table(statuses[0]))
    if len(runs) < len(known) and not as_json:
        note(f"{len(known) - len(runs)} older runs are not shown; see --limit")
    if names and any(status.job.state is JobState.UNKNOWN for status in statuses):
        raise typer.Exit(UnknownRunError.exit_code)


def _watch(one: Subject, named: Sequence[RunDirectory], directory: Path, limit: int) -> None:
    """Show runs on the whole screen until Ctrl-C, or until all named runs are over.

    Args:
        one: the run or sweep, if only one was named.
        named: the named runs, or the runs of the sweep; empty for the newest runs.
        limit: maximum number of runs to show if none are named.
    """
    from rich.live import Live

    console = output()
    if not console.is_terminal:
        raise UsageError(
            "--watch: needs a terminal",
            hint="leave it out, or use `pipectl submit --wait`",
        )
    poller, all_over, has_shown = Poller(), False, False
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not all_over:
                began_s, height = time.monotonic(), max(1, console.height - _MARGIN)
                are_named = one is not None or bool(named)
                runs = named if are_named else list_runs(directory)[-min(limit, height) :]
                statuses = poller.get_statuses(runs, time.time())
                all_over = are_named and all(status.job.state.final for status in statuses)
                statuses = statuses if one is not None else statuses[-height:]
                picture: RenderableType = plain(f"{directory}: no runs yet")
                if one is not None or statuses:
                    picture = view.draw_runs(one, statuses, height)
                foot = f"\n{time.strftime('%H:%M:%S')}  Ctrl-C closes the view; the runs continue"
                has_shown = True
                live.update(Group(picture, plain(foot, "dim")), refresh=True)
                time.sleep(max(_POLL_S, _MIN_PAUSE * (time.monotonic() - began_s)))
    except KeyboardInterrupt:
        if not has_shown:
            raise
