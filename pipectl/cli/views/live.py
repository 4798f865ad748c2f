"""`pipectl status --watch`: runs on the whole screen, until they are over or Ctrl-C."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from pipectl.cli.console import output, plain
from pipectl.cli.views.run import (
    ranks_table,
    run_lines,
    runs_table,
    sparkline,
    sweep_headline,
    sweep_table,
)
from pipectl.errors import UsageError
from pipectl.jobs.state import Poller, RunStatus
from pipectl.runs import RunDirectory, SweepDirectory, list_runs, read_metrics

_MIN_PAUSE_S = 0.5
_MIN_PAUSE = 4
"""Times as long as looking took."""
_MARGIN = 4
"""Lines that a table leaves free."""


def watch_runs(directory: Path, runs: list[RunDirectory], limit: int) -> None:
    """A table of runs; returns when all are over, or at Ctrl-C.

    Args:
        runs: empty for the newest of the directory, with those that are submitted meanwhile.
        limit: rows at most.
    """
    poller, over = Poller(), False
    with _Screen() as screen:
        while not over:
            room = max(1, min(limit, screen.height - _MARGIN))
            statuses = poller.get_statuses((runs or list_runs(directory))[-room:], time.time())
            over = bool(runs) and all(status.job.state.final for status in statuses)
            table = runs_table(statuses, screen.width)
            empty = plain(f"{directory}: no runs yet")
            screen.show(Group(table, _foot("Ctrl-C ends")) if statuses else empty)


def watch_run(run: RunDirectory) -> RunStatus:
    """Everything about one run; returns its last state when it is over, or at Ctrl-C."""
    poller = Poller()
    with _Screen() as screen:
        while True:
            (status,) = poller.get_statuses([run], time.time())
            losses = [line["loss"] for line in read_metrics(run) if line.get("loss") is not None]
            parts: list[RenderableType] = [*run_lines(status, files=False)]
            if losses:
                curve = sparkline(losses, max(10, screen.width - 10))
                parts += [Text(), plain(f"  loss  {curve}", "cyan")]
            room = screen.height - len(parts) - _MARGIN
            if status.ranks and room > 0:
                parts += [Text(), ranks_table(status, room)]
            screen.show(Group(*parts, _foot("Ctrl-C ends the view, and leaves the run alone")))
            if status.job.state.final:
                break
    return status


def watch_sweep(sweep: SweepDirectory) -> None:
    """The runs of a sweep in a table; returns when all are over, or at Ctrl-C."""
    poller, over = Poller(), False
    with _Screen() as screen:
        while not over:
            statuses = poller.get_statuses(sweep.runs(), time.time())
            over = all(status.job.state.final for status in statuses)
            room = max(1, screen.height - _MARGIN - 1)
            table = sweep_table(sweep, statuses, screen.width, room)
            head = plain(sweep_headline(sweep, statuses), "bold")
            foot = _foot("Ctrl-C ends the view, and leaves the runs alone")
            screen.show(Group(head, table, foot))


class _Screen:
    """The whole terminal.

    Within, Ctrl-C ends the view once there was something to see; before, it ends the command.

    Raises:
        UsageError: there is no terminal.
    """

    def __init__(self) -> None:
        console = output()
        if not console.is_terminal:
            raise UsageError(
                "--watch: there is no terminal to watch on",
                cure="leave it out, or follow a run with `pipectl submit --wait`",
            )
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._looks_since = time.monotonic()
        self._has_shown = False

    def __enter__(self) -> _Screen:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> bool:
        self._live.__exit__(kind, error, stack)
        return isinstance(error, KeyboardInterrupt) and self._has_shown

    @property
    def width(self) -> int:
        return self._live.console.width

    @property
    def height(self) -> int:
        return self._live.console.height

    def show(self, what: RenderableType) -> None:
        """Show it, and wait: several times as long as it took to find out."""
        self._has_shown = True
        self._live.update(what, refresh=True)
        time.sleep(max(_MIN_PAUSE_S, _MIN_PAUSE * (time.monotonic() - self._looks_since)))
        self._looks_since = time.monotonic()


def _foot(text: str) -> Text:
    return plain(f"\n{time.strftime('%H:%M:%S')}  {text}", "dim")
