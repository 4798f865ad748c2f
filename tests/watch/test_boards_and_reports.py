"""What a rank writes is read by another process, and what is written of one that cannot."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from pipectl.watch import machine
from pipectl.watch.board import SIZE, Board, Sight, create_memory, open_board
from pipectl.watch.files import report_text, write_log, write_report
from pipectl.watch.judge import Names, Verdict, judge_death
from pipectl.watch.rank import Death
from pipectl.watch.watcher import report_document

NAMES = Names(["FORWARD", "UPDATE"], ["activation"])


def test_another_mapping_sees_what_is_written(tmp_path: Path) -> None:
    board, path = Board(), tmp_path / "board"
    board.phase("capturing the model")
    board.move_to(create_memory(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    handle = os.open(path, os.O_RDONLY)
    other = open_board(handle)
    os.close(handle)
    assert other.read() == Sight(2, phase="capturing the model")
    board.step(7)
    board.row(3, 1, 5)
    board.awaits(2, 6, 1)
    board.waits(True)
    board.pace(0.5)
    seen = other.read()
    assert seen[:9] == (3, 3, 1, 5, 2, 6, 1, 7, True)
    assert seen.pace_s == 0.5
    board.row(4, 1, 5)
    assert other.read().peer == -1
    assert open_board(-1).read().moves == 1  # of a rank that could not make one


def test_all_of_a_board_is_on_the_disk_before_it_is_used(tmp_path: Path) -> None:
    """A page for which there is no room would end the rank (SIGBUS)."""
    create_memory(tmp_path / "board")
    assert (tmp_path / "board").stat().st_blocks * 512 >= SIZE


def test_a_long_phase_is_cut() -> None:
    board = Board()
    board.phase("ä" * 200)
    assert board.read().phase.startswith("ä" * 60)


def test_processes_are_told_apart_by_when_they_started() -> None:
    state = machine.process_state(os.getpid())
    assert state is not None
    assert state.parent == os.getppid()
    assert machine.process_state(2**22 + 1) is None


@pytest.mark.parametrize(
    ("sight", "stage", "words"),
    [
        (Sight(7, 0, 2, 4, step=5), 2, "rank 3, stage 2, step 5, FORWARD micro-batch 4: "),
        (Sight(7, 1, -1, -1, step=5), None, "rank 3, step 5, UPDATE: "),
        (Sight(7, step=5, phase="saving"), None, "rank 3, step 5, saving: "),
        (Sight(7, 99, -2, -1, step=5), None, "rank 3, step 5: "),  # scribbled over
    ],
)
def test_a_rank_without_a_stage_has_none(
    tmp_path: Path, sight: Sight, stage: int | None, words: str
) -> None:
    path = tmp_path / "rank-0003.json"
    document = report_document(Verdict(3, "it is \x1b[31mgone", "go on"), sight, "n1", NAMES)
    write_report(path, document)
    found = json.loads(path.read_text())
    assert (found["rank"], found["stage"], found["step"], found["host"]) == (3, stage, 5, "n1")
    assert found["earlier"] is None
    assert report_text(found) == f"pipectl: {words}it is [31mgone\npipectl: go on\n"


def test_an_end_is_told_with_when_it_was() -> None:
    found = report_document(judge_death(3, Death(12.5, earlier=2)), Sight(), "n1", NAMES)
    assert (found["time"], found["earlier"]) == (12.5, 2)


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
