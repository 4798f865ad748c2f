"""`pipectl status --watch`: runs on the whole screen, until they are over or Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pipectl.cli.console import output, plain
from pipectl.cli.ranks_view import ranks_table
from pipectl.cli.sparkline import sparkline
from pipectl.cli.status_sweep import headline, points_table
from pipectl.cli.status_table import runs_table
from pipectl.cli.status_view import run_lines
from pipectl.errors import UsageError
from pipectl.jobs.status import RunStatus
from pipectl.jobs.watching import Watching
from pipectl.runs import RunDirectory, SweepDirectory, list_runs, read_metrics

_TICK_S = 0.5
_AT_MOST = 4
"""Pauses are at least so many times as long as looking took."""
_TABLE_MARGIN = 4


def watch_all(directory: Path, limit: int) -> None:
    """A table of the newest runs, with those that are submitted meanwhile."""

    def look(console: Console) -> tuple[RenderableType, bool]:
        room = max(1, min(limit, console.height - _TABLE_MARGIN))
        found = watching.look(list_runs(directory)[-room:], time.time())
        if not found:
            return plain(f"{directory}: no runs yet"), False
        return Group(runs_table(found, console.width), _foot("Ctrl-C ends")), False

    watching = Watching()
    _show(look)


def watch_one(run: RunDirectory) -> RunStatus:
    """Everything about one run; returns when it is over, with its last state."""
    watching = Watching()
    last: list[RunStatus] = []

    def look(console: Console) -> tuple[RenderableType, bool]:
        last[:] = watching.look([run], time.time())
        return _screen(last[0], console), last[0].job.state.final

    _show(look)
    return last[0]


def watch_sweep(sweep: SweepDirectory) -> None:
    """The runs of a sweep in a table; returns when all are over."""

    def look(console: Console) -> tuple[RenderableType, bool]:
        found = watching.look(sweep.runs(), time.time())
        room = max(1, console.height - _TABLE_MARGIN - 1)
        table = points_table(sweep, found, console.width, room)
        foot = _foot("Ctrl-C ends the view, and leaves the runs alone")
        over = all(status.job.state.final for status in found)
        return Group(plain(headline(sweep, found), "bold"), table, foot), over

    watching = Watching()
    _show(look)


def _screen(found: RunStatus, console: Console) -> RenderableType:
    lines = [*run_lines(found, files=False), *_losses(found, console.width)]
    room = console.height - len(lines) - _TABLE_MARGIN
    parts: list[RenderableType] = [*lines]
    if found.ranks and room > 0:
        parts += [Text(), ranks_table(found, room)]
    return Group(*parts, _foot("Ctrl-C ends the view, and leaves the run alone"))


def _losses(found: RunStatus, width: int) -> Sequence[Text]:
    values = [line["loss"] for line in read_metrics(found.run) if line.get("loss") is not None]
    return [Text(), plain(f"  loss  {sparkline(values, max(10, width - 10))}")] if values else []


def _foot(text: str) -> Text:
    return plain(f"\n{time.strftime('%H:%M:%S')}  {text}", "dim")


def _show(look: Callable[[Console], tuple[RenderableType, bool]]) -> None:
    """Show what is found, about twice a second, until that says that it is over.

    Raises:
        KeyboardInterrupt: before there was anything to see; later, Ctrl-C just ends the view.
    """
    console = output()
    if not console.is_terminal:
        raise UsageError(
            "--watch: there is no terminal to watch on",
            cure="leave it out, or follow a run with `pipectl submit --wait`",
        )
    over = None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not over:
                before = time.monotonic()
                shown, over = look(console)
                live.update(shown, refresh=True)
                time.sleep(max(_TICK_S, _AT_MOST * (time.monotonic() - before)))
    except KeyboardInterrupt:
        if over is None:
            raise
