"""What commands show while they work; Ctrl-C and a time limit while `plan` searches."""

import io
import re
import signal
from types import SimpleNamespace

import pytest
from rich.console import Console

from pipectl.cli.app import signals_interrupt
from pipectl.cli.commands.plan import interruptible
from pipectl.cli.progress import Lines, progress_bar
from pipectl.jobs.plan_search import PlanSearch


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        pytest.param(
            {0: (50, 100, "a"), 9: (60, 100, "b"), 15: (80, 100, "c"), 45: (100, 100, "d")},
            ["profiling: 60%, about 40.0 s left", "profiling: 80%, about 13.3 s left",
             "profiling: 80%, about 26.7 s left"], id="counted"),
        pytest.param({0: (5, 100, "op")}, ["profiling: 5%"] * 3, id="does not move"),
        pytest.param(
            {0: (0, 0, "capturing"), 30: (0, 0, "planning"), 35: (1, 10, "op")},
            ["capturing: 10.0 s", "capturing: 20.0 s", "profiling: 10%"], id="not counted"),
        pytest.param({0: (0, 0, "planning"), 9: (0, 0, "explaining")}, ["explaining: 10.0 s",
                     "explaining: 20.0 s"], id="the next phase"),
        pytest.param(
            {0: (50, 100, "a"), 9: (100, 100, "b"), 15: (0, 1, "messages"), 20: (3, 7, "messages")},
            ["profiling messages: 43%, about 13.3 s left",
             "profiling messages: 43%, about 26.7 s left"], id="counted again"),
    ],
)  # fmt: skip
def test_a_line_after_ten_twenty_and_forty_seconds_of_a_phase(capfd, monkeypatch, reports, said):
    now = 0.0
    monkeypatch.setattr("pipectl.cli.progress.monotonic", lambda: now)
    lines = Lines("profiling")
    for second in range(48):
        now = float(second)
        if second in reports:
            lines.report(*reports[second])
        lines.tick()
    assert capfd.readouterr().err.splitlines() == said


def test_a_terminal_shows_what_goes_on_before_anything_is_counted(place, monkeypatch):
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


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_interrupt_ends_the_search_and_the_second_aborts(capfd, how):
    search, before = PlanSearch(), signal.getsignal(how)
    with signals_interrupt(), interruptible(search):
        assert not search.expired()
        signal.raise_signal(how)
        assert search.expired()
        assert "stopping with the best plan so far; Ctrl-C again aborts" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(how) == before


def test_the_budget_is_of_each_plan_and_an_interrupt_of_all(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("pipectl.jobs.plan_search.time", clock)
    search, endless = PlanSearch(budget_s=10), PlanSearch()
    expired = []
    for now[0], restarts in ((9.9, False), (9.9, True), (19.5, False), (20.0, False), (20.0, True)):
        if restarts:
            search.restart()
        expired.append(search.expired())
    assert expired == [False, False, False, True, False]
    assert search.cut_short
    assert (endless.expired(), endless.cut_short) == (False, False)
    endless.interrupted = True
    assert not endless.cut_short, "no planner was told"
    endless.restart()
    assert (endless.expired(), endless.cut_short) == (True, True)
