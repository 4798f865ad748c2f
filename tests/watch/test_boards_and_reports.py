"""What a rank writes is read by another process, and what is written of one that cannot."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pipectl.watch.board import SIZE, Activity, Board, create_memory, open_board
from pipectl.watch.files import report_text, write_log
from pipectl.watch.rank import process_state


def test_another_mapping_sees_what_is_written(tmp_path: Path) -> None:
    board, path = Board(), tmp_path / "board"
    board.phase("capturing the model")
    board.move_to(create_memory(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_blocks * 512 >= SIZE  # a full disk would end the rank later (SIGBUS)
    handle = os.open(path, os.O_RDONLY)
    other = open_board(handle)
    os.close(handle)
    assert other.read() == Activity(2, phase="capturing the model")
    board.step(7)
    board.row(3, 1, 5)
    board.awaits(2, 6, 1)
    board.waits(True)
    board.pace(0.5)
    seen = other.read()
    assert seen == Activity(3, 3, 1, 5, 2, 6, 1, 7, True, 0.5, "capturing the model")
    board.row(4, 1, 5)
    assert other.read().peer == -1
    board.phase("ä" * 200)
    assert other.read().phase.startswith("ä" * 60)
    assert open_board(-1).read().moves == 1  # of a rank that could not make one


def test_processes_are_told_apart_by_when_they_started() -> None:
    state = process_state(os.getpid())
    assert state is not None
    assert state.parent == os.getppid()
    assert process_state(2**22 + 1) is None


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"stage": 2, "step": 5, "action": "UPDATE"}, "rank 3, stage 2, step 5, UPDATE: "),
        ({"stage": None, "step": 5, "action": ""}, "rank 3, step 5: "),
        ({"type": "ValueError"}, "rank 3: ValueError: "),
    ],
)
def test_a_report_is_fit_for_terminals(document: dict[str, object], words: str) -> None:
    report = {"rank": 3, "message": "it is \x1b[31mgone", "cure": "go \x07on", **document}
    assert report_text(report) == f"pipectl: {words}it is [31mgone\npipectl: go on\n"


def test_a_log_that_nobody_reads_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipectl.watch.files._PATIENCE_MS", 10)
    frozen, log = os.pipe()
    write_log(log, "x" * 10**6)
    assert len(os.read(frozen, 10**6)) == 1 << 16
    write_log(log, "a line\n")
    assert os.read(frozen, 100) == b"a line\n"
    os.close(frozen)
    write_log(log, "a line\n")
    os.close(log)
