"""What is read of logs, and of which rank it is."""

import os

import pytest

from pipectl.runs import Line, Log, Logs, RunDirectory


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("rank-0003.log", b"text", Line(3, "[3] text")),
        ("rank-0012.log", b"", Line(12, "[12] ")),
        ("rank-0001.log", b"[3] fooled?", Line(1, "[1] [3] fooled?")),
        ("rank-0003.log", b"10%\r[4] 20%\r", Line(3, "[3] [4] 20%")),
        ("rank-12345.log", b"dos\r", Line(12345, "[12345] dos")),
        ("job.log", b"[3] fooled?", Line(None, "[3] fooled?")),
        ("job.log", b"10%\r20%\r30%", Line(None, "30%")),
        ("job.log", b"caf\xe9", Line(None, "caf\ufffd")),
        ("job.log", b"", Line(None, "")),
        ("node-n1.log", b"[3] text", Line(3, "[3] text")),
        ("node-n1.log", b"[1] [3] fooled?", Line(1, "[1] [3] fooled?")),
        ("node-n1.log", b"[3] 10%\r[4] 20%\r", Line(3, "[3] [4] 20%")),
        ("node-n1.log", b"[03] text", Line(None, "[03] text")),
        ("node-n1.log", "[٣] text".encode(), Line(None, "[٣] text")),
    ],
)
def test_whose_a_line_is(tmp_path, name, text, line):
    path = tmp_path / name
    path.write_bytes(text + b"\n")
    assert list(Log(path).read_lines(to_the_end=True)) == [line]


def test_a_line_that_grows_is_read_once_and_whole_and_a_log_that_was_cut_from_its_begin(tmp_path):
    path = tmp_path / "rank-0000.log"
    log = Log(path)
    assert list(log.read_lines()) == []
    path.write_bytes(b"caf\xc3")
    assert list(log.read_lines()) == []
    with path.open("ab") as file:
        file.write(b"\xa9\nbeg")
    assert list(log.read_lines()) == [Line(0, "[0] café")]
    assert list(log.read_lines(to_the_end=True)) == [Line(0, "[0] beg")]
    assert list(log.read_lines(to_the_end=True)) == []
    with path.open("ab") as file:
        file.write(b"thr")
    assert list(log.read_lines()) == []
    path.write_text("new\n")
    assert list(log.read_lines(to_the_end=True)) == [Line(0, "[0] new")]


def test_long_logs_are_read_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("pipectl.runs.readers._CHUNK", 7)
    monkeypatch.setattr("pipectl.runs.readers._MAX_LINE", 20)
    path = tmp_path / "node-n1.log"
    path.write_text("".join(f"[{rank}] {'x' * rank}\n" for rank in range(10)) + "y" * 50)
    lines = list(Log(path).read_lines(to_the_end=True))
    assert [line.rank for line in lines] == [*range(10), None, None, None]


def test_logs_of_ranks_come_before_that_of_the_job_by_their_numbers(tmp_path):
    run = RunDirectory(tmp_path)
    run.logs.mkdir()
    run.job_log.write_text("why\n")
    for rank in (10000, 10, 9):
        run.rank_log(rank).write_text("text\n")
    run.rank_log(0).symlink_to("/dev/zero")  # which is no file
    os.mkfifo(run.rank_log(1))
    run.rank_log(2).mkdir()
    texts = [line.text for line in Logs(run).read_lines(to_the_end=True)]
    assert texts == ["[9] text", "[10] text", "[10000] text", "why"]
