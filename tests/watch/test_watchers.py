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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipectl.runs import RunDirectory, read_errors
from pipectl.schedule import Kind
from pipectl.watch import charge, machine, watcher
from pipectl.watch.board import Board, shared_memory
from pipectl.watch.charge import BYE, FAILING
from pipectl.watch.head import Head
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


def test_what_a_rank_says_right_before_its_end_is_heard(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rank,) = job.start(1)
    monkeypatch.setattr(charge, "_still", lambda _pid, _before: rank.says(FAILING))
    own = rank.watcher._charge
    own.look()
    assert own.ended_at
    assert own.explains


def test_a_crash_is_told_in_pythons_words(job: Job) -> None:
    (rank,) = job.start(1)
    rank.says(b"Fatal Python error: Segmentation fault\n")
    rank.watch()
    rank.ends()
    rank.is_left()
    assert job.reports[0] == "its process crashed: Fatal Python error: Segmentation fault"


@pytest.mark.parametrize(
    ("turns", "last", "words"),
    [
        (0, b"", "killed by the kernel, for lack of memory"),
        (3, b"", "its process was killed (SIGKILL, say)"),
        (0, b"Fatal Python error: Aborted\n", "its process crashed"),
        (3, b"Fatal Python error: Aborted\n", "its process crashed"),
    ],
)
def test_only_who_is_killed_just_then_was_killed_for_memory(
    job: Job, monkeypatch: pytest.MonkeyPatch, turns: int, last: bytes, words: str
) -> None:
    """The kernel counts the processes of all jobs of the machine."""
    kills = [7]
    monkeypatch.setattr(machine, "killed_for_memory", lambda: kills[0])
    monkeypatch.setattr(charge, "_RECENT_S", 0.0)
    (rank,) = job.start(1)
    rank.watcher._turn()
    kills[0] += 1
    for _ in range(turns):
        rank.watcher._turn()
    rank.says(last)
    rank.ends()
    rank.watch()
    rank.is_left()
    assert job.reports[0].startswith(words)


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


def test_of_watchers_that_nobody_answers_the_one_whose_rank_ended_first_counts(job: Job) -> None:
    _, other, first = job.start(3)
    for rank in (other, first):
        rank.watcher._turn()
    for rank in (first, other):
        rank.ends()
        rank.watcher._turn()
    for rank in (other, first):
        rank.watcher._now = LONG_S
        rank.watcher._turn()
    assert [error["rank"] for error in read_errors(RunDirectory(job.errors.parent))] == [2, 1]


def test_many_messages_do_not_stop_the_clock_of_the_head(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are judged once a tick, which takes long where they are many."""
    judged: list[float] = []

    def verdict(head: Head, now: float) -> None:
        judged.append(now)
        time.sleep(0.005)

    monkeypatch.setattr(Head, "verdict", verdict)
    monkeypatch.setattr(watcher, "_TICK_S", 1.0)
    first, second = job.start(2)
    first.watch()
    begun = time.monotonic()
    while (passed_s := time.monotonic() - begun) < 2.0:
        second.watcher._deliver(second.watcher._content())
        time.sleep(0.001)
    assert first.watcher._now == pytest.approx(passed_s, abs=0.5)
    assert len(judged) <= 3
    first.says(BYE)
    first.is_left()


def test_without_a_sign_of_the_head_a_rank_that_stands_still_is_ended(job: Job) -> None:
    first, second = job.start(2, least_s=0.5)
    second.board.step(7)
    second.watch()
    second.watcher._answered_at = 0.0  # and never again: the head's watcher does not run
    assert second.process.wait(LONG_S) == -signal.SIGKILL
    second.is_left()
    assert list(job.reports) == [0]
    (error,) = read_errors(RunDirectory(job.errors.parent))
    assert "its node: it is gone" in error["message"]
    assert (error["host"], error["step"]) == (socket.gethostname(), 7)
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
