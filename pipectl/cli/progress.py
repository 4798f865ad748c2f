"""How far something is and how long it will still take: a bar, or lines without a terminal."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.status import Status

from pipectl.cli.console import errors, note, plain
from pipectl.units import format_time

if TYPE_CHECKING:
    from pipectl.jobs.deadline import Deadline

Report = Callable[[int, int, str], None]
"""Called with (done, total, what is or was done); a total of 0 says that nobody knows how long."""
_LINE_S, _QUIET_S = 10.0, 1.0
_MAX_TEXT, _FIGURES = 48, 32
"""Columns of the text at most, and of what stands beside it."""


@contextmanager
def progress_bar(counted: str = "") -> Iterator[Report]:
    """A function ``report(done, total, what)`` that moves the bar.

    It moves from the start, before anything is reported.

    Args:
        counted: what goes on, where ``done`` and ``total`` are shares of expected work rather
            than steps: shown in percent, and told in lines where there is no terminal.
    """
    console = errors()
    if not console.is_terminal:
        if counted:
            with Lines(counted).running() as report:
                yield report
        else:
            yield _silent
        return
    figure: ProgressColumn = TaskProgressColumn() if counted else MofNCompleteColumn()
    room = max(1, min(_MAX_TEXT, console.width - _FIGURES))
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}", markup=False), BarColumn(12), figure)
    with Progress(*columns, times[0], console=console, transient=True) as progress:
        task = progress.add_task(counted or "starting", total=None)

        def report(done: int, total: int, what: str) -> None:
            text = plain(what).plain.replace("\n", " ")
            text = f"{counted} {text}" if counted and total else text
            shown = text if len(text) <= room else f"{text[: room - 1]}…"
            progress.columns = (*columns, times[1 if total else 0])
            progress.update(
                task,
                completed=done,
                total=total or None,
                description=f"{shown:{room}}",
                refresh=not total,
            )

        yield report


class Lines:
    """A line now and then, less and less often; nothing about what is over soon.

    Args:
        what: goes on.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._phase = ""
        self._since = clock()
        self._next_s = _LINE_S
        self._told: tuple[float, int] | None = None

    def report(self, done: int, total: int, what: str) -> None:
        """Tell how far it is and, at the pace since the last line, how long it will take."""
        if not total and what == self._phase:
            return
        if not total:
            self._phase, self._since, self._next_s, self._told = what, self._clock(), _LINE_S, None
            return
        now = self._clock()
        self._phase = ""
        if self._told is None:
            self._told = (now, done)
        since, before = self._told
        if now - since < _LINE_S or done >= total:
            return
        self._told = (now, done)
        left = "" if done <= before else self._left((now - since) / (done - before), total - done)
        note(f"{self._what}: {done / total:.0%}{left}")

    def tick(self) -> None:
        """Tell what has been going on for long without a report: after 10, 20, 40, ... seconds."""
        phase, passed_s = self._phase, self._clock() - self._since
        if phase and passed_s >= self._next_s:
            self._next_s *= 2
            note(f"{phase}: {format_time(passed_s)}")

    @contextmanager
    def running(self) -> Iterator[Report]:
        """Within, a thread looks at the time."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(1.0):
                self.tick()

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield self.report
        finally:
            over.set()
            thread.join()

    def _left(self, pace_s: float, rest: int) -> str:
        return f", about {format_time(max(1.0, pace_s * rest))} left"


def _silent(_done: int, _total: int, _what: str) -> None:
    pass


class Watch:
    """A line on the terminal that says what goes on, after the first second.

    Args:
        console: one that is no terminal gets a line after 10, 20, 40, ... seconds.
    """

    def __init__(self, console: Console) -> None:
        self._status = Status("planning", console=console) if console.is_terminal else None
        self._lines = Lines("")
        self._over = threading.Event()
        self._what = "planning"
        self._thread = threading.Thread(target=self._show, daemon=True)

    def tell(self, what: str) -> None:
        """What goes on from now."""
        self._what = what
        self._lines.report(0, 0, what)

    def start(self) -> None:
        """Begin to count."""
        self._lines.report(0, 0, self._what)
        self._thread.start()

    def stop(self) -> None:
        """Clear the line."""
        self._over.set()
        self._thread.join()
        if self._status is not None:
            self._status.stop()

    def _show(self) -> None:
        if self._status is None:
            while not self._over.wait(_QUIET_S):
                self._lines.tick()
            return
        began = time.monotonic()
        if self._over.wait(_QUIET_S):
            return
        self._status.start()
        while not self._over.wait(_QUIET_S / 4):
            passed = format_time(max(1.0, time.monotonic() - began))
            self._status.update(plain(f"{self._what}: {passed} (Ctrl-C: the best so far)"))


@contextmanager
def stoppable(deadline: Deadline) -> Iterator[Watch]:
    """Within, Ctrl-C ends planning with what it has; the second one aborts."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        deadline.interrupt()
        note("ending with the best so far; Ctrl-C again aborts", style="")

    watch = Watch(errors())
    before = signal.signal(signal.SIGINT, stop)
    watch.start()
    try:
        yield watch
    finally:
        signal.signal(signal.SIGINT, before)
        watch.stop()
