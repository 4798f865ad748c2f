"""The progress of work: a bar in a terminal, else lines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import typer
from rich import progress as bars

from pipectl.cli.app import INTERRUPTED
from pipectl.cli.console import errors, note, plain
from pipectl.units import Report, format_time

LINE_S = 10.0
"""Seconds of work before the first line."""
_MAX_TEXT, _FIGURES = 48, 38
"""Maximum columns of the text, and columns of the figures beside it."""


@contextmanager
def progress_bar(work: str = "") -> Iterator[Report]:
    """Show progress; gives a function ``report(done, total, what)``.

    Args:
        work: name of the work if ``done`` and ``total`` are amounts of expected work instead of
            steps. It is then shown in percent, and also without a terminal.
    """
    console = errors()
    if not console.is_terminal:
        lines, over = Lines(work), threading.Event()

        def look() -> None:
            while not over.wait(1.0):
                lines.tick()

        thread = threading.Thread(target=look, daemon=True)
        if work:
            thread.start()
        try:
            yield lines.report
        finally:
            over.set()
            if work:
                thread.join()
        return
    figure = bars.TaskProgressColumn() if work else bars.MofNCompleteColumn()
    room = max(1, min(_MAX_TEXT, console.width - _FIGURES))
    bar = (bars.TextColumn("{task.description}", markup=False), bars.BarColumn(12))
    waiting = (*bar, bars.TimeElapsedColumn())
    counting = (*bar, figure, bars.TimeRemainingColumn(), bars.TextColumn("left"))
    with bars.Progress(*waiting, console=console, transient=True) as progress:
        task = progress.add_task(work or "starting", total=None)

        def report(done: int, total: int, what: str) -> None:
            text = plain(what).plain.replace("\n", " ")
            text = f"{work} {text}" if work and total else text
            text = text if len(text) <= room else f"{text[: room - 1]}…"
            progress.columns = counting if total else waiting
            progress.update(
                task,
                completed=done,
                total=total or None,
                description=f"{text:{room}}",
                refresh=not total,
            )

        yield report


class Lines:
    """Prints a line after 10, 20, 40, ... seconds of each phase."""

    def __init__(self, work: str) -> None:
        self._work, self._phase = work, ""
        self._counted = work
        self._began_s = self._pause_s = 0.0
        self._first = self._done = self._total = 0

    def report(self, done: int, total: int, what: str) -> None:
        """Store the progress. Counted work is one phase until it is counted from the beginning."""
        if total and done < self._done:
            self._counted = f"{self._work} {what}"
        phase = self._counted if total else what
        if phase != self._phase:
            self._phase, self._began_s, self._pause_s = phase, monotonic(), LINE_S
            self._first = done
        self._done, self._total = done, total

    def tick(self) -> None:
        """Print a line if it is time, with the time left at the speed so far."""
        passed_s, done, total = monotonic() - self._began_s, self._done, self._total
        if not self._phase or passed_s < self._pause_s or (total and done >= total):
            return
        self._pause_s *= 2
        text = format_time(passed_s)
        if total:
            text = f"{done / total:.0%}"
            if self._first < done < total:
                left_s = passed_s / (done - self._first) * (total - done)
                text += f", about {format_time(max(1.0, left_s))} left"
        note(f"{self._phase}: {text}")


@contextmanager
def profiling_progress() -> Iterator[Report]:
    """Show the progress of profiling; an interrupt prints what is kept, and exits with 130."""
    try:
        with progress_bar("profiling") as report:
            yield report
    except KeyboardInterrupt as stop:
        count = getattr(stop, "kept", 0)
        kept = f"; {count} measurements are kept: the same command continues from there"
        note(f"interrupted{kept if count else ' before anything was measured'}", style="")
        raise typer.Exit(INTERRUPTED) from stop
