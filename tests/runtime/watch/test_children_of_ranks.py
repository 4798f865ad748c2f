"""What becomes of a process that a rank has forked is no matter of the rank's watcher."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

FORKING = Path(__file__).with_name("rank_with_children.py")
CODES = [-signal.SIGTERM.value, -signal.SIGTERM.value, -signal.SIGSEGV.value]


@pytest.mark.mpi
def test_a_watcher_hears_nothing_of_children_that_end(launch: Any) -> None:
    """Only the signal that the rank gets itself; it is as it was before it forked them."""
    done = launch(0, FORKING)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{CODES} {[signal.SIGUSR1.value]} [] True\n"
