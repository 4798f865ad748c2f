"""Processes that the measuring process starts beside itself: fresh ones, which share nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable
from multiprocessing.process import BaseProcess


def start_processes(processes: Iterable[BaseProcess]) -> None:
    """Start processes that ignore Ctrl-C, which is for the measuring process."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in processes:
            process.start()
    finally:
        signal.signal(signal.SIGINT, before)


def begin_apart() -> None:
    """In such a process, before all else: print nothing from now on, also when it is terminated,
    and let the user's code start processes as in a program of its own.

    What fails here also fails in the measuring process, which tells the user.
    """
    # Else a DataLoader would spawn its workers, as this process was, and each would run the script.
    multiprocessing.set_start_method(None, force=True)
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    os.close(silence)
    # Ends as other programs do: locks of the user's libraries would be reported as leaked.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
