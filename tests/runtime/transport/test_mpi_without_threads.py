"""An MPI that was started for a single thread: polling helps messages, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipectl.runs import read_heartbeat
from pipectl.runtime import checkpoint

pytestmark = pytest.mark.mpi
WHY = "this MPI does not allow calls from several threads"


def test_polling_takes_the_place_of_the_thread(
    make_spec: Any, make_run: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make_run(make_spec(1)), make_run(make_spec(2, launch={"progress": "thread"}))
    assert work(0, one).returncode == 0
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", "single")
    done = work(2, two)
    assert done.returncode == 0, done.stderr
    beat = read_heartbeat(two)
    assert (beat["messages"]["progress"], beat["messages"]["why"]) == ("poll", WHY)
    weights = [checkpoint.load(run.checkpoints / "step-000005") for run in (one, two)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


MIXED = """
import os, mpi4py
mpi4py.rc.thread_level = "single" if os.environ[RANK] == "1" else "multiple"
from mpi4py import MPI
from pipectl.runtime.transport import Circumstances, choose_progress
assert (MPI.Query_thread() == MPI.THREAD_MULTIPLE) == (MPI.COMM_WORLD.rank != 1)
found = choose_progress(MPI.COMM_WORLD, "auto", Circumstances([2, 1], 2**20))
everyone = MPI.COMM_WORLD.allgather(found)
assert all(choice == found for choice in everyone), everyone
assert found.mode == "poll", found
assert "several threads" in found.why, found
"""


def test_one_rank_without_threads_decides_for_all(launch: Any, tmp_path: Any) -> None:
    script = tmp_path / "mixed.py"
    script.write_text("RANK = 'PMI_RANK'\n" + MIXED)
    done = launch(3, script)
    assert done.returncode == 0, done.stderr
