"""What commands show while they work, and Ctrl-C while `plan` searches."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path

import pytest
from rich.console import Console

from pipectl.cli.app import signals_interrupt
from pipectl.cli.commands.plan import interruptible
from pipectl.cli.progress import Lines, progress_bar
from pipectl.jobs.plan_search import PlanSearch


def test_a_line_every_ten_seconds_with_the_time_left(capfd: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = Lines("profiling", lambda: now)
    for second, done in [(0, 50), (5, 60), (11, 72), (15, 80), (22, 94), (40, 100)]:
        now = float(second)
        lines.report(done, 100, "op")
    assert capfd.readouterr().err.splitlines() == [
        "profiling: 72%, about 14.0 s left",
        "profiling: 94%, about 3.00 s left",
    ]


def test_work_that_does_not_move_has_no_end(capfd: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = Lines("profiling", lambda: now)
    lines.report(0, 0, "op")
    lines.report(5, 100, "op")
    now = 20.0
    lines.report(0, 100, "op")
    assert capfd.readouterr().err.splitlines() == ["profiling: 0%"]


def test_what_has_no_figures_is_told_less_and_less_often(
    capfd: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    lines = Lines("profiling", lambda: now)
    lines.report(0, 0, "capturing the model")
    for second in range(50):
        now = float(second)
        lines.report(0, 0, "capturing the model")
        lines.tick()
    lines.report(1, 10, "op")
    now = 1000.0
    lines.tick()
    assert capfd.readouterr().err.splitlines() == [
        "capturing the model: 10.0 s",
        "capturing the model: 20.0 s",
        "capturing the model: 40.0 s",
    ]


def test_a_terminal_shows_what_goes_on_before_anything_is_counted(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr("pipectl.cli.progress.errors", lambda: terminal)
    with progress_bar("profiling") as report:
        report(0, 0, "loading torch")
        terminal.print("shown")
        report(1, 2, "x" * 200)
    with interruptible(PlanSearch()) as tell:
        terminal.print("shown")
        tell("planning for 4 nodes")
    lines = re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", screen.getvalue())
    for words in ("loading torch ", "planning (Ctrl-C: the best so far) ", "planning for 4 nodes "):
        assert any(line.startswith(words) for line in lines), words
    assert not any("x" * 60 in line for line in lines)


def test_short_work_is_not_told_without_a_terminal(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("profiling") as report:
        for done in range(5):
            report(done, 4, "op")
    assert capfd.readouterr().err == ""


def test_the_first_interrupt_ends_the_search_and_the_second_aborts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    search, before = PlanSearch(), signal.getsignal(signal.SIGINT)
    with interruptible(search):
        assert not search.expired()
        signal.raise_signal(signal.SIGINT)
        assert search.expired()
        assert "stopping with the best plan so far; Ctrl-C again aborts" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_the_search_otherwise_gets_the_best_so_far_too(how: signal.Signals) -> None:
    search = PlanSearch()
    with signals_interrupt(), interruptible(search):
        signal.raise_signal(how)
        assert search.expired()
