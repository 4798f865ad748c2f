"""Measurements that outlive an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipectl.errors import UsageError
from pipectl.profiler.journal import Journal

HEADER = {"key": "k", "threads": 1}
TIMES = {"rounds": [1, 2.5, None], "name": "é"}


def keys(path: Path, header: dict[str, Any] = HEADER) -> list[str]:
    """What a journal still knows of a, b and c."""
    journal = Journal(path, header)
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


def test_what_was_noted_is_in_the_file_at_once_until_the_measurement_is_complete(
    path: Path,
) -> None:
    journal = Journal(path, HEADER)
    assert journal.find("b") == TIMES
    journal.note("c", {})
    assert keys(path) == ["a", "b", "c"]  # if it were killed now
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
    texts = [b"\x80\x04N.", b"", b"\n", b"{}", b"null", b'{"journal": null, "entries": 1}']
    for content in (*texts, *(whole[:end] for end in range(0, len(whole) - 1, 7))):
        path.write_bytes(content)
        assert keys(path) == [], content
        Journal(path, HEADER).note("a", TIMES)
        assert keys(path) == ["a"]


def test_without_a_file_it_keeps_in_memory_and_a_place_that_cannot_be_written_is_named(
    tmp_path: Path,
) -> None:
    journal = Journal()
    journal.match("graph")
    journal.note("a", TIMES)
    assert journal.find("a") == TIMES
    journal.remove()
    with pytest.raises(UsageError, match=r"no/x\.journal: cannot be written"):
        Journal(tmp_path / "no" / "x.journal", HEADER)
