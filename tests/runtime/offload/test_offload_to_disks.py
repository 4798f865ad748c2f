"""Ranks that offload to a disk, also to one that is too small, or that somebody fills meanwhile."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipectl.cluster import OffloadTarget
from pipectl.plan import Plan
from pipectl.runs import RunDirectory, read_errors, read_metrics

pytestmark = pytest.mark.mpi
PARTS = Path(__file__).parents[1] / "job_parts.py"
FILLED = "TEST_FILLED_DIRECTORY"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``disk(size)``: a file system of that size, which takes the right to mount one."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "tmpfs", str(directory), "-o"]

    def mount(size: str) -> Path:
        if shutil.which("mount") is None:
            pytest.skip("no mount")
        done = subprocess.run([*command, f"size={size}"], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
        return directory

    yield mount
    if directory.is_mount():
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture
def offloading(
    make_spec: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], RunDirectory]:
    """``offloading(directory)``: two ranks that write what they keep to a directory."""

    def make(directory: Path) -> RunDirectory:
        pipeline = {"micro_batches": 4, "stages": 2}
        sections = {
            "model": {"factory": f"{PARTS}:Wide"},
            "loss": {"factory": "torch.nn:MSELoss"},
            "data": {"factory": f"{PARTS}:Vectors"},
        }
        run = make_run(make_spec(2, pipeline=pipeline, **sections))
        monkeypatch.setenv("TMPDIR", str(directory))
        plan = Plan.load(run.plan)
        stages = tuple(replace(stage, offload=True) for stage in plan.stages)
        changed = replace(plan, stages=stages, schedule="gpipe", warm_up=(4, 4))
        replace(changed, offload_to=OffloadTarget.DISK).save(run.plan)
        return run

    return make


def test_it_trains_and_leaves_no_file(offloading: Any, work: Any, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = work(2, offloading(disk))
    assert done.returncode == 0, done.stderr
    assert list(disk.iterdir()) == []


def test_a_missing_directory_ends_the_job_by_name(
    offloading: Any, work: Any, tmp_path: Path
) -> None:
    run = offloading(tmp_path / "missing")
    done = work(2, run)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    report = read_errors(run)[0]
    assert f"no space for offload in {tmp_path}/missing on" in report.message
    assert "TMPDIR" in report.cure


def test_a_disk_that_is_too_small_is_refused_before_anything_starts(
    offloading: Any, work: Any, disk: Any
) -> None:
    directory = disk("1m")
    run = offloading(directory)
    done = work(2, run)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    reports = read_errors(run)
    assert reports
    for report in reports:
        assert f"no space for offload in {directory} on " in report.message
        assert report.message.endswith("for all its ranks there, have 1.00 MiB")
        assert "need " in report.message
        assert "TMPDIR" in report.cure
    assert not run.heartbeat.exists()


def test_a_disk_that_fills_meanwhile_ends_all_ranks(
    offloading: Any, work: Any, disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = disk("8m")
    run = offloading(directory)
    monkeypatch.setenv(FILLED, str(directory))
    done = work(2, run)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    first = read_errors(run)[0]
    rank = first.rank
    assert first.message.startswith(f"rank {rank}: no space for offload in {directory}: ")
    assert first.message.endswith("and the disk is full")
    assert first.stage == rank
    assert first.action.startswith("OFFLOAD_WAIT micro-batch ")
    assert "TMPDIR" in first.cure
    assert read_metrics(run) == []
