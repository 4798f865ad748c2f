"""What is read of logs, and of which rank it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipectl.runs import Line, Printed, RunDirectory, late_lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"[3] text", Line(3, "[3] text")),
        (b"[12] ", Line(12, "[12] ")),
        (b"[1] [3] fooled?", Line(1, "[1] [3] fooled?")),
        (b"[3]", Line(None, "[3]")),
        (b"[3]text", Line(None, "[3]text")),
        (b" [3] text", Line(None, " [3] text")),
        (b"[03] text", Line(None, "[03] text")),
        (b"[-1] text", Line(None, "[-1] text")),
        ("[٣] text".encode(), Line(None, "[٣] text")),
        (b"[prepare] [3] x", Line(None, "[prepare] [3] x")),
        (b"[mpiexec@n1] x", Line(None, "[mpiexec@n1] x")),
        (b"10%\r20%\r30%", Line(None, "30%")),
        (b"[3] 10%\r[4] 20%\r", Line(3, "[3] [4] 20%")),
        (b"[3] dos\r", Line(3, "[3] dos")),
        (b"caf\xe9", Line(None, "caf\ufffd")),
        (b"", Line(None, "")),
    ],
)
def test_the_begin_of_a_line_says_whose_it_is(tmp_path: Path, text: bytes, line: Line) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(text + b"\nlast\n")
    assert list(Printed(path).all()) == [line, Line(None, "last")]


def test_a_line_that_grows_is_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    printed = Printed(path)
    assert list(printed.whole()) == []
    path.write_bytes(b"[0] caf\xc3")
    assert list(printed.whole()) == []
    with path.open("ab") as log:
        log.write(b"\xa9\n[1] beg")
    assert list(printed.whole()) == [Line(0, "[0] café")]
    assert list(printed.all()) == [Line(1, "[1] beg")]
    assert list(printed.all()) == []


def test_long_logs_are_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipectl.runs.printed._CHUNK", 7)
    path = tmp_path / "job.log"
    path.write_text("".join(f"[{rank}] {'x' * rank}\n" for rank in range(30)))
    assert [line.rank for line in Printed(path).all()] == [*range(30)]


def test_what_came_late_is_in_order_of_starts_and_ranks(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.logs.mkdir()
    for attempt, rank in ((2, 1), (1, 10), (1, 9)):
        run.late_log(str(rank), str(attempt)).write_text(f"[{rank}] start {attempt}\n")
    assert [line.text for line in late_lines(run)] == ["[9] start 1", "[10] start 1", "[1] start 2"]
