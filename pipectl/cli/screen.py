"""Watching runs on the whole screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.live import Live

from pipectl.cli.console import output, plain
from pipectl.errors import UsageError
from pipectl.jobs.state import Poller, RunStatus
from pipectl.runs import RunDirectory

_POLL_S = 0.5
_MARGIN = 4
"""Lines of the screen that a table leaves free."""
_MIN_PAUSE = 4
"""Pause between two looks, as a multiple of the time that a look takes."""


def watch(
    find_runs: Callable[[int], Sequence[RunDirectory]],
    draw: Callable[[Sequence[RunStatus], int, int], RenderableType],
    *,
    ends: bool,
) -> None:
    """Runs on the whole screen, until Ctrl-C or their end.

    Args:
        find_runs: given how many rows there is room for; asked for every picture.
        draw: of their states, within so many columns and lines.
        ends: whether to return when all are over.

    Raises:
        UsageError: there is no terminal.
        KeyboardInterrupt: Ctrl-C before there was something to see.
    """
    console = output()
    if not console.is_terminal:
        raise UsageError(
            "--watch: needs a terminal",
            cure="leave it out, or use `pipectl submit --wait`",
        )
    poller, all_over, has_shown = Poller(), False, False
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not all_over:
                began_s, height = time.monotonic(), max(1, console.height - _MARGIN)
                statuses = poller.get_statuses(find_runs(height), time.time())
                all_over = ends and all(status.job.state.final for status in statuses)
                foot = f"\n{time.strftime('%H:%M:%S')}  Ctrl-C closes the view; the runs continue"
                picture = draw(statuses, console.width, height)
                has_shown = True
                live.update(Group(picture, plain(foot, "dim")), refresh=True)
                time.sleep(max(_POLL_S, _MIN_PAUSE * (time.monotonic() - began_s)))
    except KeyboardInterrupt:
        if not has_shown:
            raise
