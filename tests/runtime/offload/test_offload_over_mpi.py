"""Ranks that offload, started as a job starts them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipectl.cluster import OffloadTarget
from pipectl.plan import Plan
from pipectl.runs import RunDirectory


@pytest.fixture
def offloading(
    make_spec: Callable[..., Any],
    make_run: Callable[..., RunDirectory],
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """``offloading(directory)``: a run whose first stage writes to a directory."""

    def make(directory: Path) -> RunDirectory:
        run = make_run(make_spec(2, pipeline={"micro_batches": 4, "stages": 2}))
        monkeypatch.setenv("TMPDIR", str(directory))
        plan = Plan.load(run.plan)
        stages = tuple(replace(stage, offload=True) for stage in plan.stages)
        warm_up = (plan.micro_batches,) * 2
        changed = replace(plan, stages=stages, schedule="gpipe", warm_up=warm_up)
        replace(changed, offload_to=OffloadTarget.DISK).save(run.plan)
        return run

    return make


@pytest.mark.mpi
def test_it_trains_and_leaves_no_file(offloading: Any, work: Any, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = work(2, offloading(disk))
    assert done.returncode == 0, done.stderr
    assert list(disk.iterdir()) == []


@pytest.mark.mpi
def test_a_missing_directory_ends_the_job_by_name(
    offloading: Any, work: Any, tmp_path: Path
) -> None:
    run = offloading(tmp_path / "missing")
    done = work(2, run)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    found = json.loads(next(run.errors.iterdir()).read_text())
    assert f"no space for offload in {tmp_path}/missing on" in found["message"]
    assert "TMPDIR" in found["cure"]
