"""Commands that may be interrupted at any moment, and tidy up or say what they leave behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from pipectl.cli.console import note
from pipectl.cli.failure import INTERRUPTED

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within, SIGTERM and the end of the terminal do what Ctrl-C does, as if there was one.

    Whoever ends the command sends both, or one twice: the first counts, so that none ends the
    tidying up. A signal that is ignored (`nohup`), or taken already, stays so.
    """

    def interrupt(_number: int, frame: FrameType | None) -> None:
        for number in ours:
            signal.signal(number, signal.SIG_IGN)
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    ours = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def resumable() -> Iterator[None]:
    """Within, an interrupt prints one line and exits with 130."""
    try:
        yield
    except KeyboardInterrupt as stop:
        note(_line(getattr(stop, "kept", 0)), style="")
        raise typer.Exit(INTERRUPTED) from stop


def _line(kept: int) -> str:
    if not kept:
        return "interrupted before anything was measured"
    return f"interrupted; {kept} measurements are kept: the same command goes on from there"
