"""The order in which processes of one parent ended, asked for when all have."""

from __future__ import annotations

import os
import subprocess

import pytest

from pipectl.watch.siblings import Siblings


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_kernel_tells_the_order(order: tuple[int, ...]) -> None:
    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    watchers = [Siblings(rank.pid, os.getpid()) for rank in ranks]
    for watcher in watchers:
        watcher.find()
        assert watcher.ended_before() == 0
    for rank in order:
        ranks[rank].kill()
        ranks[rank].wait()
    assert [watchers[rank].ended_before() for rank in order] == [0, 1, 2]


def test_a_rank_without_siblings_is_the_first() -> None:
    rank = subprocess.Popen(["sleep", "60"])
    alone = Siblings(rank.pid, 0)
    alone.find()
    rank.kill()
    rank.wait()
    assert alone.ended_before() == 0
