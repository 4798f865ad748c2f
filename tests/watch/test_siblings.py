"""The order in which processes of one parent ended, asked for when all have."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from pipectl.watch.siblings import Siblings


@pytest.fixture
def parent() -> Iterator[psutil.Process]:
    """A process with three children."""
    shell = psutil.Popen(["bash", "-c", "sleep 60 & sleep 60 & sleep 60 & wait"])
    while len(shell.children()) < 3:
        time.sleep(0.01)
    yield shell
    for process in (*shell.children(), shell):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    shell.wait()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_kernel_tells_the_order(parent: psutil.Process, order: tuple[int, ...]) -> None:
    ranks = parent.children()
    watchers = [Siblings(rank.pid, parent.pid, "job") for rank in ranks]
    for watcher in watchers:
        watcher.find()
        assert watcher.ended_before() == 0
    for rank in order:
        ranks[rank].kill()
        ranks[rank].wait(30)
    assert [watchers[rank].ended_before() for rank in order] == [0, 1, 2]


SHOWS = """
import sys
from pipectl.watch.siblings import show_sign
sign = show_sign("job")
print(sign is not None, flush=True)
input()
sign.close()  # as the kernel does first, when a process is killed
print("files given back", flush=True)
input()
"""


def test_a_rank_that_gave_its_files_back_first_is_the_first() -> None:
    """Its launcher killed the other before all of its threads had ended."""
    talks = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    dying, killed = (subprocess.Popen([sys.executable, "-c", SHOWS], **talks) for _ in range(2))
    ranks = dying, killed
    assert [rank.stdout.readline() for rank in ranks] == ["True\n", "True\n"]
    watchers = [Siblings(rank.pid, os.getpid(), "job") for rank in ranks]
    for watcher in watchers:
        watcher.find()
    dying.stdin.write("\n")
    dying.stdin.flush()
    assert dying.stdout.readline() == "files given back\n"
    for rank in (killed, dying):
        rank.kill()
        rank.communicate()
    first, second = (watcher.ended_before() for watcher in watchers)
    assert first < second


def test_a_rank_without_siblings_is_the_first() -> None:
    rank = subprocess.Popen(["sleep", "60"])
    alone = Siblings(rank.pid, 0, "job")
    alone.find()
    rank.kill()
    rank.wait()
    assert alone.ended_before() == 0
