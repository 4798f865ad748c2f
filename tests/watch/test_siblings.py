"""The order in which processes of one parent ended, asked for when all have."""

from __future__ import annotations

import subprocess
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
    watchers = [Siblings(rank.pid, parent.pid) for rank in ranks]
    for watcher in watchers:
        watcher.find()
        assert watcher.ended_before() == 0
    for rank in order:
        ranks[rank].kill()
        ranks[rank].wait(30)
    assert [watchers[rank].ended_before() for rank in order] == [0, 1, 2]


def test_a_rank_without_siblings_is_the_first() -> None:
    rank = subprocess.Popen(["sleep", "60"])
    alone = Siblings(rank.pid, 0)
    alone.find()
    rank.kill()
    rank.wait()
    assert alone.ended_before() == 0
