"""Measurements that outlive an interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipectl.errors import UsageError
from pipectl.profiler.journal import Journal

HEADER = {"key": "k", "threads": 1}
TIMES = {"forward_s": 1e-05, "backward_s": 0.1}


def keys(path: Path, header: dict[str, Any] | None = None) -> list[str]:
    """What a journal still knows of a, b and c."""
    with Journal(path, header or HEADER) as journal:
        known = [key for key in "abc" if journal.find(key) is not None]
        assert len(journal) == len(known)
        return known


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal with the measurements a and b."""
    path = tmp_path / "x.journal"
    with Journal(path, HEADER) as journal:
        journal.match("graph")
        journal.note("a", TIMES)
        journal.note("b", {"rounds": [1, 2.5, None], "name": "é"})
    return path


def test_what_was_noted_is_found_unchanged(path: Path) -> None:
    with Journal(path, HEADER) as journal:
        assert journal.find("a") == TIMES
        assert journal.find("b") == {"rounds": [1, 2.5, None], "name": "é"}
        assert journal.find("c") is None
        journal.note("c", {})
    assert keys(path) == ["a", "b", "c"]


def test_a_note_is_in_the_file_at_once(path: Path) -> None:
    with Journal(path, HEADER) as journal:
        journal.note("c", TIMES)
        assert path.read_text().splitlines()[-1] == json.dumps(["c", TIMES])


@pytest.mark.parametrize("header", [{"key": "other", "threads": 1}, {"key": "k"}])
def test_another_header_discards_all(path: Path, header: dict[str, Any]) -> None:
    assert keys(path, header) == []
    assert keys(path) == []


def test_another_graph_discards_all(path: Path) -> None:
    with Journal(path, HEADER) as journal:
        journal.match("graph")
        assert len(journal) == 2
        journal.match("other")
        assert journal.find("a") is None
        journal.note("c", TIMES)
    assert keys(path) == ["c"]


def test_it_may_end_anywhere(path: Path) -> None:
    whole = path.read_bytes()
    ends = (whole.index(b'["b"'), len(whole))
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        expected = ["a", "b"][: sum(end >= line for line in ends)]
        with Journal(path, HEADER) as journal:
            journal.note("c", TIMES)
        assert keys(path) == [*expected, "c"], end


@pytest.mark.parametrize(
    "damage",
    [b"\0\0", b"\xff\xfe", b"null", b'["b"]', b'["b", 1]', b'[1, {}]', b"[" * 10000, b'{"b": {}}'],
)  # fmt: skip
def test_what_stands_behind_a_damaged_line_is_dropped(path: Path, damage: bytes) -> None:
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:-1], damage, lines[-1], b""]))
    assert keys(path) == ["a"]


@pytest.mark.parametrize("content", [b"", b"\n", b"\x80\x04N.", b"{}\n" * 3])
def test_a_file_that_is_no_journal_starts_anew(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert keys(path) == []
    with Journal(path, HEADER) as journal:
        journal.note("a", TIMES)
    assert keys(path) == ["a"]


def test_a_second_writer_leaves_the_file_alone(path: Path) -> None:
    with Journal(path, HEADER) as first:
        with Journal(path, HEADER) as second:
            assert second.find("a") is None
            second.note("c", TIMES)
            assert second.find("c") == TIMES
            second.remove()
        first.note("b", {"late": 1})
    with Journal(path, HEADER) as journal:
        assert (journal.find("b"), journal.find("c")) == ({"late": 1}, None)


def test_a_complete_measurement_leaves_nothing(path: Path) -> None:
    with Journal(path, HEADER) as journal:
        journal.remove()
    assert not path.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no/x\.journal: cannot be written"):
        Journal(tmp_path / "no" / "x.journal", HEADER)


def test_a_killed_writer_leaves_whole_notes(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from pipectl.profiler.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]), {'key': 'k', 'threads': 1})\n"
        "journal.note('a', {'x': 1}); journal.note('b', {'x': 2}); print('noted', flush=True)\n"
        "time.sleep(60)\n"
    )
    path = tmp_path / "x.journal"
    child = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"noted\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert keys(path) == ["a", "b"]
