"""What a rank writes is read by another process, and what is written of one that cannot."""

import mmap
import os

import pytest

from pipectl.faults import ErrorReport
from pipectl.files import write_log
from pipectl.watch import process_state
from pipectl.watch.board import SIZE, Activity, Board, read_activity, wait_record


def test_another_mapping_sees_what_is_written():
    board = Board()
    other = mmap.mmap(board.handle, SIZE, prot=mmap.PROT_READ)
    board.phase("capturing the model")
    assert read_activity(other) == Activity(2, action="capturing the model")
    board.step(7)
    board.row("FORWARD", 1, 5)
    board.awaits(wait_record("activation 5 of stage 0 from rank 2", 2))
    board.waits(True)
    board.pace(0.5)
    seen = read_activity(other)
    assert seen == board.read()
    assert seen[:7] == (3, 7, 1, 2, True, True, 0.5)
    assert seen[7:] == ("FORWARD micro-batch 5", "activation 5 of stage 0 from rank 2")
    board.phase("ä" * 200)
    assert read_activity(other).peer == -1
    assert read_activity(other).action.startswith("ä" * 40)
    board.return_to(seen)
    assert read_activity(other).action == "FORWARD micro-batch 5"
    board.row("UPDATE", 0, -1)
    assert read_activity(other).action == "UPDATE"


def test_processes_are_told_apart_by_when_they_started():
    state = process_state(os.getpid())
    assert state is not None
    assert state.parent == os.getppid()
    assert process_state(2**22 + 1) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stage": 2, "step": 5, "action": "UPDATE"}, "rank 3, stage 2, UPDATE, step 5: "),
        ({"step": 5, "host": "n1"}, "rank 3 on n1, step 5: "),
        ({"type": "ValueError"}, "rank 3: ValueError: "),
    ],
)
def test_a_report_is_fit_for_terminals(fields, words):
    report = ErrorReport("it is \x1b[31mgone", rank=3, cure="go \x07on", **fields)
    assert report.text == f"pipectl: {words}it is [31mgone\npipectl: go on\n"


def test_a_log_that_nobody_reads_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("pipectl.files._PATIENCE_MS", 10)
    frozen, log = os.pipe()
    write_log(log, "x" * 10**6)
    assert len(os.read(frozen, 10**6)) == 1 << 16
    write_log(log, "a line\n")
    assert os.read(frozen, 100) == b"a line\n"
    os.close(frozen)
    write_log(log, "a line\n")
    os.close(log)
