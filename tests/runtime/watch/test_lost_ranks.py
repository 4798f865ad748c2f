"""Ranks that are killed or frozen: all end, one is named, nothing is left."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]


def test_a_killed_rank(begin: Any) -> None:
    ranks = begin()
    ranks.wait_for_steps(3)
    before = set(os.listdir("/dev/shm"))
    killed_at = time.time()
    os.kill(ranks.pids[1], signal.SIGKILL)
    log = ranks.end()
    assert ranks.all_gone_within(15)
    error = ranks.error()
    assert error["time"] - killed_at < 10
    assert (error["rank"], error["stage"]) == (1, 1)
    assert error["step"] >= 3
    assert "micro-batch" in error["action"]
    assert "its process was killed" in error["message"]
    assert "pipectl: rank 1, stage 1, step" in log
    print(error, log, len(before), len(set(os.listdir("/dev/shm")) - before))


def test_a_frozen_rank(begin: Any) -> None:
    ranks = begin()
    ranks.wait_for_steps(3)
    frozen_at = time.time()
    os.kill(ranks.pids[1], signal.SIGSTOP)
    log = ranks.end()
    assert ranks.all_gone_within(15)
    error = ranks.error()
    print(error, error["time"] - frozen_at, log)
    assert (error["rank"], error["stage"]) == (1, 1)
