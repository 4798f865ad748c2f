"""`status --watch`, on a pretended terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from pipectl.runs import Members, SweepDirectory

if TYPE_CHECKING:
    from conftest import Command, RunOf

START = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, it is ignored
from pipectl.cli import main
sys.exit(main(sys.argv[1:]))
"""
ENTER, LEAVE, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str, rows: int = 30, columns: int = 100) -> None:
        self._side, other = pty.openpty()
        self.resize(rows, columns)
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(other)
        self.text = ""

    def resize(self, rows: int, columns: int) -> None:
        ioctl(self._side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, wanted: str, timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while wanted not in self.text:
            assert time.monotonic() < end, self.text
            assert self._read(), self.text

    def end(self, timeout_s: float = 100.0) -> int:
        """Read all that is left, and wait."""
        last = time.monotonic() + timeout_s
        while self._read():
            if time.monotonic() > last:
                self.process.kill()
        os.close(self._side)
        return self.process.wait(60)

    def _read(self) -> bool:
        """What there is by now; False when the terminal is closed."""
        if select.select([self._side], [], [], 0.2)[0]:
            try:
                self.text += os.read(self._side, 1 << 16).decode(errors="replace")
            except OSError:  # how a terminal ends
                return False
        return True


def test_the_terminal_is_left_clean(run_of: RunOf, finished: Path) -> None:
    run_of("20250103-120000-tiny")
    terminal = Terminal("status", "--watch")
    terminal.read_until("Ctrl-C ends")
    terminal.resize(24, 60)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0
    assert terminal.text.count(ENTER) == terminal.text.count(LEAVE) == 1
    assert terminal.text.rindex(SHOW_CURSOR) > terminal.text.index(ENTER)
    assert "20250101-120000-tiny" in terminal.text
    assert "Traceback" not in terminal.text


def test_one_run_is_watched_to_its_end(finished: Path) -> None:
    beat = {"version": 1, "state": "training", "ranks": [{"rank": 0, "waiting": 0.5}]}
    (finished / "heartbeat.json").write_text(json.dumps(beat))
    terminal = Terminal("status", "last", "--watch")
    assert terminal.end() == 0
    screen, _, rest = terminal.text.partition(LEAVE)
    assert re.search("loss  [▁▂▃▄▅▆▇█]{10}", screen)
    assert "█████" in screen
    assert "COMPLETED" in rest, "the last state stays on the terminal"


@pytest.mark.parametrize("arguments", [(), ("last",), ("rates",)])
def test_ctrl_c_in_the_first_look(
    cli: Command, finished: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Of all runs, one, or a sweep, while the batch system is asked, say."""
    sweep, runs = SweepDirectory.create(Path("runs"), "rates", 2, 1.8e9)
    sweep.save(Members("tag", tuple(run.name for run in runs), None))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    screen = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr("pipectl.cli.follow.output", lambda: screen)
    monkeypatch.setattr("pipectl.jobs.state.Poller.get_statuses", interrupt)
    result = cli("status", *arguments, "--watch")
    assert (result.code, result.out, result.err) == (130, "", "")


def test_it_needs_a_terminal(cli: Command, finished: Path) -> None:
    for arguments in ([], ["last"]):
        result = cli("status", *arguments, "--watch")
        assert (result.code, "no terminal" in result.err) == (2, True)
    assert cli("status", "--watch", "--json").code == 2
