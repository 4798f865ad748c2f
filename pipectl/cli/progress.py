"""How far something is and how long it will still take: a bar, or lines without a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from pipectl.cli.console import errors, note, plain
from pipectl.units import format_time

Report = Callable[[int, int, str], None]
_LINE_S = 10.0
_WIDEST = 40


@contextmanager
def progress_bar(counted: str = "") -> Iterator[Report]:
    """A function ``report(done, total, what)`` that moves the bar.

    Args:
        counted: what goes on, where ``done`` and ``total`` are shares of expected work rather
            than steps: shown in percent, and told in lines where there is no terminal.
    """
    console = errors()
    if not console.is_terminal:
        yield Lines(counted).report if counted else _silent
        return
    figure: ProgressColumn = TaskProgressColumn() if counted else MofNCompleteColumn()
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), figure, TimeRemainingColumn(elapsed_when_finished=True))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(counted, total=None)

        def report(done: int, total: int, what: str) -> None:
            text = plain(what).plain.replace("\n", " ")
            shown = text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
            description = f"{counted} {shown:{_WIDEST}}" if counted else text
            progress.update(task, completed=done, total=total, description=description)

        yield report


class Lines:
    """A line now and then; nothing about what is over soon.

    Args:
        what: that goes on.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._told: tuple[float, int] | None = None

    def report(self, done: int, total: int, _what: str) -> None:
        """Tell how far it is and, at the pace since the last line, how long it will take."""
        now = self._clock()
        if self._told is None:
            self._told = (now, done)
        since, before = self._told
        if now - since < _LINE_S or done >= total:
            return
        self._told = (now, done)
        left = "" if done <= before else self._left((now - since) / (done - before), total - done)
        note(f"{self._what}: {done / total:.0%}{left}")

    def _left(self, pace_s: float, rest: int) -> str:
        return f", about {format_time(max(1.0, pace_s * rest))} left"


def _silent(_done: int, _total: int, _what: str) -> None:
    pass
