"""How far something is and how long it will still take: a bar, or lines without a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich import progress as bars

from pipectl.cli.app import INTERRUPTED
from pipectl.cli.console import errors, note, plain
from pipectl.units import format_time

if TYPE_CHECKING:
    from pipectl.profiler.progress import Progress

LINE_S = 10.0
"""Seconds between lines, at least."""
_MAX_TEXT, _FIGURES = 48, 38
"""Columns of the text at most, and of what stands beside it."""


@contextmanager
def progress_bar(work: str = "") -> Iterator[Progress]:
    """A function ``report(done, total, what)`` that moves the bar, which moves from the start.

    Args:
        work: what goes on, if ``done`` and ``total`` are shares of expected work, not steps: shown
            in percent, and in lines without a terminal.
    """
    console = errors()
    if not console.is_terminal:
        if work:
            with Lines(work).running() as report:
                yield report
        else:
            yield lambda _done, _total, _what: None
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
            line = text if len(text) <= room else f"{text[: room - 1]}…"
            progress.columns = counting if total else waiting
            progress.update(
                task,
                completed=done,
                total=total or None,
                description=f"{line:{room}}",
                refresh=not total,
            )

        yield report


@contextmanager
def profiling_progress() -> Iterator[Progress]:
    """The bar of a profile being measured; an interrupt prints what is kept, and exits with 130."""
    try:
        with progress_bar("profiling") as report:
            yield report
    except KeyboardInterrupt as stop:
        count = getattr(stop, "kept", 0)
        kept = f"; {count} measurements are kept: the same command continues from there"
        note(f"interrupted{kept if count else ' before anything was measured'}", style="")
        raise typer.Exit(INTERRUPTED) from stop


class Lines:
    """A line now and then, less and less often; nothing about what is over soon.

    Args:
        what: goes on.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._phase: str | None = None
        self._since, self._done, self._pause_s = clock(), 0, LINE_S

    def report(self, done: int, total: int, what: str) -> None:
        """Tell how far it is and, at the pace since the last line, how long it will take."""
        now, phase = self._clock(), "" if total else what
        if phase != self._phase:
            self._phase, self._since, self._done, self._pause_s = phase, now, done, LINE_S
        elif total and now - self._since >= LINE_S and done < total:
            left = ""
            if done > self._done:
                left_s = (now - self._since) / (done - self._done) * (total - done)
                left = f", about {format_time(max(1.0, left_s))} left"
            self._since, self._done = now, done
            note(f"{self._what}: {done / total:.0%}{left}")

    def tick(self) -> None:
        """Tell what has been going on for long without a report: after 10, 20, 40, ... seconds."""
        phase, passed_s = self._phase, self._clock() - self._since
        if phase and passed_s >= self._pause_s:
            self._pause_s *= 2
            note(f"{phase}: {format_time(passed_s)}")

    @contextmanager
    def running(self) -> Iterator[Progress]:
        """Within, a thread looks at the time."""
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(1.0):
                self.tick()

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield self.report
        finally:
            stop.set()
            thread.join()
