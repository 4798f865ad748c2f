"""`status --watch`, on a pretended terminal."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from pipectl.runs import SweepDirectory

if TYPE_CHECKING:
    from conftest import Command, RunOf

ENTER, LEAVE, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal of 100 columns and 30 lines is sent while a command watches."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100, height=30, color_system=None)
    monkeypatch.setenv("TERM", "xterm-256color")
    for module in ("commands.status", "console"):
        monkeypatch.setattr(f"pipectl.cli.{module}.output", lambda: console)
    return text


def test_ctrl_c_ends_the_view_and_leaves_the_terminal_clean(
    cli: Command, screen: io.StringIO, run_of: RunOf, finished: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run_of("20250103-120000-tiny")

    def interrupt(_seconds: float) -> None:
        assert "Ctrl-C closes the view" in screen.getvalue()
        raise KeyboardInterrupt

    clock = SimpleNamespace(**{**vars(time), "sleep": interrupt})
    monkeypatch.setattr("pipectl.cli.commands.status.time", clock)
    result = cli("status", "--watch")
    assert (result.code, result.err) == (0, "")
    text = screen.getvalue()
    assert text.count(ENTER) == text.count(LEAVE) == 1
    assert text.rindex(SHOW_CURSOR) > text.index(ENTER)
    for shown in text.split(LEAVE):
        assert "20250101-120000-tiny" in shown, "on the screen, and once more when it is left"


def test_one_run_is_watched_to_its_end(cli: Command, screen: io.StringIO, finished: Path) -> None:
    rank = {"rank": 0, "node": "n1", "stages": [0], "waiting": 0.5}
    beat = {"version": 1, "state": "training", "ranks": [rank]}
    (finished / "heartbeat.json").write_text(json.dumps(beat))
    result = cli("status", "last", "--watch")
    assert result.code == 0
    picture = screen.getvalue().partition(LEAVE)[0]
    assert "  loss  █" in picture, "as a curve"
    assert "rank  node  stage  busy" in picture, "as there is room for it"
    assert "COMPLETED" in screen.getvalue().partition(LEAVE)[2], (
        "the last state stays on the terminal"
    )


@pytest.mark.parametrize("arguments", [(), ("last",), ("rates",)])
def test_ctrl_c_in_the_first_look_ends_the_command(
    cli: Command, screen: io.StringIO, finished: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
) -> None:  # fmt: skip
    """Of all runs, one, or a sweep, while the batch system is asked, say."""
    SweepDirectory.create(Path("runs"), "rates", 2, 1.8e9)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipectl.jobs.state.Poller.get_statuses", interrupt)
    result = cli("status", *arguments, "--watch")
    assert (result.code, result.out, result.err) == (130, "", "")
