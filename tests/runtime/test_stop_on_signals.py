"""Signals to a rank ask for a checkpoint and the end of the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pipectl.runtime.stopping import stop_on_signals


@pytest.mark.parametrize(
    ("name", "content"), [("TERM", "TERM\n"), ("INT", "INT\n"), ("USR1", ""), ("USR2", "")]
)
def test_a_signal_makes_the_file_and_ends_nothing(tmp_path: Path, name: str, content: str) -> None:
    number = signal.Signals[f"SIG{name}"]
    before = signal.getsignal(number)
    with stop_on_signals(tmp_path / "stop"):
        assert not (tmp_path / "stop").exists()
        signal.raise_signal(number)
    assert (tmp_path / "stop").read_text() == content
    assert signal.getsignal(number) is before


def test_a_directory_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    with stop_on_signals(tmp_path / "gone" / "stop"):
        signal.raise_signal(signal.SIGTERM)


def test_what_a_rank_has_forked_ends_by_signals_as_ever(tmp_path: Path) -> None:
    """Workers that load data, say, which their parent ends by SIGTERM."""
    with stop_on_signals(tmp_path / "stop"):
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not (tmp_path / "stop").exists()
