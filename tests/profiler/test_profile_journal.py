"""Measurements that outlive an interruption."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipectl.errors import UsageError
from pipectl.profiler.journal import Journal

HEADER = {"key": "k", "threads": 1}
TIMES = {"rounds": [1, 2.5, None], "name": "é"}
WRITER = """
import sys, time
from pathlib import Path
from pipectl.profiler.journal import Journal
journal = Journal(Path(sys.argv[1]), {"key": "k", "threads": 1})
journal.note("a", {"x": 1})
journal.note("b", {"x": 2})
print("noted", flush=True)
time.sleep(60)
"""


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
    journal.note("a", {"forward_s": 1e-05})
    journal.note("b", TIMES)
    return path


def test_what_was_noted_is_found_until_the_measurement_is_complete(path: Path) -> None:
    journal = Journal(path, HEADER)
    assert journal.find("b") == TIMES
    journal.note("c", {})
    assert keys(path) == ["a", "b", "c"]
    journal.match("graph")
    assert len(journal) == 3
    journal.match("other")
    assert journal.find("a") is None
    journal.note("c", TIMES)
    assert keys(path) == ["c"]
    journal.remove()
    assert not path.exists()


@pytest.mark.parametrize("header", [{"key": "other", "threads": 1}, {"key": "k"}])
def test_another_header_discards_all(path: Path, header: dict[str, Any]) -> None:
    assert keys(path, header) == []
    assert keys(path) == []


def test_a_file_that_is_no_whole_journal_starts_anew(path: Path) -> None:
    whole = path.read_bytes()
    texts = ["", "\n", "{}", "null", '{"journal": 1', '{"journal": null, "entries": 1}']
    cut_off = [whole[:end] for end in range(0, len(whole) - 1, 7)]
    for content in (b"\x80\x04N.", *(text.encode() for text in texts), *cut_off):
        path.write_bytes(content)
        assert keys(path) == [], content
        Journal(path, HEADER).note("a", TIMES)
        assert keys(path) == ["a"]


def test_without_a_file_it_keeps_in_memory() -> None:
    journal = Journal()
    journal.match("graph")
    journal.note("a", TIMES)
    assert journal.find("a") == TIMES
    journal.remove()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no/x\.journal: cannot be written"):
        Journal(tmp_path / "no" / "x.journal", HEADER)


def test_a_killed_writer_leaves_whole_notes(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"noted\n"
        child.kill()
    assert keys(path) == ["a", "b"]
