"""A progress bar with the remaining time, on a terminal; nothing where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipectl.cli.console import errors, plain

Report = Callable[[int, int, str], None]


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A function ``report(done, total, what)`` that moves the bar."""
    console = errors()
    if not console.is_terminal:
        yield lambda _done, _total, _what: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def report(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=plain(what).plain)

        yield report
