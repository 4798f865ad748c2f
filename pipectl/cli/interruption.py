"""Measuring that may be interrupted at any moment, and says what it leaves behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from pipectl.cli.console import note
from pipectl.cli.failure import INTERRUPTED


@contextmanager
def resumable() -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM print one line and exit with 130."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as stop:
        note(_line(getattr(stop, "kept", 0)), style="")
        raise typer.Exit(INTERRUPTED) from stop
    finally:
        signal.signal(signal.SIGTERM, before)


def _line(kept: int) -> str:
    if not kept:
        return "interrupted before anything was measured"
    return f"interrupted; {kept} measurements are kept: the same command goes on from there"
