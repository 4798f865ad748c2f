"""Measurements that outlive an interruption."""

from __future__ import annotations

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
    journal = Journal(path, header or HEADER)
    known = [key for key in "abc" if journal.find(key) is not None]
    assert len(journal) == journal.resumed == len(known)
    return known


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal with the measurements a and b."""
    path = tmp_path / "x.journal"
    journal = Journal(path, HEADER)
    journal.match("graph")
    journal.note("a", TIMES)
    journal.note("b", {"rounds": [1, 2.5, None], "name": "é"})
    return path


def test_what_was_noted_is_found_unchanged(path: Path) -> None:
    journal = Journal(path, HEADER)
    assert journal.find("a") == TIMES
    assert journal.find("b") == {"rounds": [1, 2.5, None], "name": "é"}
    assert journal.find("c") is None
    journal.note("c", {})
    assert keys(path) == ["a", "b", "c"]


@pytest.mark.parametrize("header", [{"key": "other", "threads": 1}, {"key": "k"}])
def test_another_header_discards_all(path: Path, header: dict[str, Any]) -> None:
    assert keys(path, header) == []
    assert keys(path) == []


def test_another_graph_discards_all(path: Path) -> None:
    journal = Journal(path, HEADER)
    journal.match("graph")
    assert len(journal) == 2
    journal.match("other")
    assert journal.find("a") is None
    journal.note("c", TIMES)
    assert keys(path) == ["c"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\x80\x04N.",
        b"{}",
        b"null",
        b'{"journal": 1',
        b'{"journal": null, "entries": 1}',
    ],
)
def test_a_file_that_is_no_journal_starts_anew(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert keys(path) == []
    Journal(path, HEADER).note("a", TIMES)
    assert keys(path) == ["a"]


def test_a_journal_that_is_cut_off_starts_anew(path: Path) -> None:
    whole = path.read_bytes()
    for end in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:end])
        assert keys(path) == [], end


def test_without_a_file_it_keeps_in_memory() -> None:
    journal = Journal()
    journal.match("graph")
    journal.note("a", TIMES)
    assert journal.find("a") == TIMES
    journal.remove()


def test_a_complete_measurement_leaves_nothing(path: Path) -> None:
    journal = Journal(path, HEADER)
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
