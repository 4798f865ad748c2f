"""Watchers of processes that stand in for ranks: how each sees its own end, and who reports it.

Whole jobs that lose ranks are in tests/runtime/watch, where watchers are processes of their own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipectl.schedule import Kind
from pipectl.watch import watcher
from pipectl.watch.board import Board, shared_memory
from pipectl.watch.charge import BYE, FAILING
from pipectl.watch.wire import listen

LONG_S = 60.0
KINDS = [kind.name for kind in Kind]


class Rank:
    """A process that sleeps, what it says through its pipe, and its watcher in a thread."""

    def __init__(self, rank: int, given: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
        self.process = subprocess.Popen(["/bin/sleep", "600"])
        self._theirs, self.pipe = os.pipe()
        os.set_blocking(self._theirs, False)
        memory, board = shared_memory()
        self.board = Board()
        self.board.move_to(memory)
        patch.setattr(watcher, "_PIPE", self._theirs)
        more = {"rank": rank, "pid": self.process.pid, "board": board}
        kind = watcher.Watcher if rank else watcher.Leader
        self.watcher = kind({**given, **more})
        os.close(board)
        self._thread = threading.Thread(target=self.watcher.watch, daemon=True)

    def watch(self) -> None:
        self._thread.start()

    def says(self, words: bytes) -> None:
        os.write(self.pipe, words)

    def ends(self) -> None:
        self.process.kill()
        self.process.wait()

    def is_left(self) -> None:
        """Wait until the watcher has ended."""
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.ends()
        for handle in (self._theirs, self.pipe):
            os.close(handle)


class Job:
    """Ranks of one job, the first of them with the head."""

    def __init__(self, errors: Path, patch: pytest.MonkeyPatch) -> None:
        self.errors, self._patch = errors, patch
        self.ranks: list[Rank] = []

    def start(self, size: int, *, least_s: float = LONG_S) -> list[Rank]:
        """So many ranks; watch them one by one."""
        own = listen()
        given = {
            "hosts": [socket.gethostname()], "port": own.getsockname()[1], "secret": "s",
            "socket": -1, "size": size, "node": "here", "errors": str(self.errors),
            "launched": False, "script": 0, "least_s": least_s, "predicted_s": 0.0,
            "kinds": KINDS, "lanes": [],
        }  # fmt: skip
        for rank in range(size):
            handle = own.detach() if rank == 0 else -1
            self.ranks.append(Rank(rank, {**given, "socket": handle}, self._patch))
        return self.ranks

    @property
    def reports(self) -> dict[int, str]:
        """What was said of each rank that was found lost."""
        files = sorted(self.errors.glob("rank-*.json"))
        return {int(file.stem[5:]): json.loads(file.read_text())["message"] for file in files}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    errors = tmp_path / "errors"
    errors.mkdir()
    monkeypatch.setattr(watcher, "_TICK_S", 0.1)
    made = Job(errors, monkeypatch)
    yield made
    for rank in made.ranks:
        rank.close()


@pytest.fixture
def two(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[Job, Rank, Rank]:
    """The head and another rank, both watched, of a job that is soon ended."""
    monkeypatch.setattr(watcher, "_GRACE_S", 0.2)
    first, second = job.start(2)
    first.watch()
    second.watch()
    return job, first, second


@pytest.mark.parametrize("words", [BYE, FAILING])
def test_a_rank_alone_that_says_why_it_ends_is_not_reported(job: Job, words: bytes) -> None:
    (rank,) = job.start(1)
    rank.watch()
    rank.says(words)
    rank.is_left()
    assert job.reports == {}


def test_a_rank_that_is_killed_is_reported(job: Job) -> None:
    (rank,) = job.start(1)
    rank.board.phase("loading data")
    rank.watch()
    rank.ends()
    rank.is_left()
    assert "killed" in job.reports[0]


def test_the_head_reports_another_that_is_killed_and_ends_all(
    two: tuple[Job, Rank, Rank],
) -> None:
    job, first, second = two
    second.ends()
    second.is_left()
    assert first.process.wait(LONG_S) == -signal.SIGKILL
    first.is_left()
    assert list(job.reports) == [1]
    assert "killed" in job.reports[1]


def test_a_rank_that_says_why_it_fails_ends_all_and_is_not_reported(
    two: tuple[Job, Rank, Rank],
) -> None:
    job, first, second = two
    second.says(FAILING + b"ValueError")
    second.ends()
    assert first.process.wait(LONG_S) == -signal.SIGKILL
    for rank in (first, second):
        rank.is_left()
    assert job.reports == {}


def test_a_crash_is_told_in_pythons_words(job: Job) -> None:
    (rank,) = job.start(1)
    rank.says(b"Fatal Python error: Segmentation fault\n")
    rank.watch()
    rank.ends()
    rank.is_left()
    assert job.reports[0] == "its process crashed: Fatal Python error: Segmentation fault"


def test_a_rank_that_is_asked_to_end_and_does_not_is_killed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipectl.watch.charge._LAST_WORDS_S", 0.2)
    (rank,) = job.start(1)
    rank.watch()
    rank.says(bytes([signal.SIGTERM]))
    assert rank.process.wait(LONG_S) == -signal.SIGKILL
    rank.is_left()
    assert job.reports == {}


def test_a_watcher_that_nobody_answers_reports_by_itself(job: Job) -> None:
    _, second = job.start(2)
    second.watch()
    second.ends()
    second.is_left()
    assert "killed" in job.reports[1]


def test_without_a_sign_of_the_head_a_rank_that_stands_still_is_ended(job: Job) -> None:
    first, second = job.start(2, least_s=0.5)
    second.watch()
    second.watcher._answered_at = 0.0  # and never again: the head's watcher does not run
    assert second.process.wait(LONG_S) == -signal.SIGKILL
    second.is_left()
    assert list(job.reports) == [0]
    assert "its node: it is gone" in job.reports[0]
    assert first.process.poll() is None


def test_what_it_watches_is_told_on_its_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, int]]] = []

    class Fake:
        def __init__(self, given: dict[str, int]) -> None:
            seen.append((type(self).__name__, given))

        def watch(self) -> None: ...

    theirs, ours = os.pipe()
    monkeypatch.setattr(watcher, "_PIPE", theirs)
    monkeypatch.setattr(watcher, "outlive_signals", lambda: None)
    for kind in ("Leader", "Watcher"):
        monkeypatch.setattr(watcher, kind, type(kind, (Fake,), {}))
    for rank in (0, 3):
        os.write(ours, json.dumps({"rank": rank}).encode() + b"\n")
        watcher.main()
        os.set_blocking(theirs, True)
    os.close(ours)
    watcher.main()  # of a rank that ended before it told anything
    assert seen == [("Leader", {"rank": 0}), ("Watcher", {"rank": 3})]
    os.close(theirs)
