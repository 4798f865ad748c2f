"""Planning that can be watched, and ended at any moment with the best found so far."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.status import Status

from pipectl.cli.console import errors, note, plain
from pipectl.cli.progress import Lines
from pipectl.jobs.deadline import Deadline
from pipectl.units import format_time

_QUIET_S = 1.0


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
