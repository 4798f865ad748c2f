"""Ranks that train slowly, in order to be killed, frozen or disturbed in other ways."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from pipectl.cluster import assumed_cluster
from pipectl.planner import PlanRequest, make_plan
from pipectl.profiler import profile_job
from pipectl.runs import RunDirectory, read_errors, read_heartbeat, read_metrics
from pipectl.spec import dump, load

PARTS = Path(__file__).parent.parent / "job_parts.py"
HANG_AFTER_S = 3
STEPS = 400
RANKS = 3
PATIENCE_S = 120


def document() -> dict[str, Any]:
    return {
        "version": 1,
        "name": "watched",
        "site_defaults": False,
        "model": {"factory": f"{PARTS}:Model", "kwargs": {"depth": 3}},
        "loss": {"factory": f"{PARTS}:loss"},
        "data": {"factory": f"{PARTS}:Slow"},
        "optimizer": {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.1}},
        "training": {"steps": STEPS, "batch_size": 2},
        "pipeline": {"micro_batches": 2, "stages": RANKS},
        "checkpoint": {"every": 2},
        "launch": {"hang_after": f"{HANG_AFTER_S}s"},
        "resources": {"tasks_per_node": RANKS},
    }


@dataclass
class Ranks:
    """A run under way."""

    run: RunDirectory
    launcher: subprocess.Popen[str]
    pids: dict[int, int] = field(default_factory=dict)
    watchers: list[psutil.Process] = field(default_factory=list)

    def wait_for_steps(self, steps: int) -> None:
        """Until so many are done and all ranks are known."""
        deadline = time.monotonic() + PATIENCE_S
        while len(read_metrics(self.run)) < steps:
            assert self.launcher.poll() is None, self.launcher.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        beat = read_heartbeat(self.run)
        assert beat is not None
        self.pids = {rank["rank"]: rank["pid"] for rank in beat["ranks"]}
        found = [psutil.Process(pid).children() for pid in self.pids.values()]
        self.watchers = [child for children in found for child in children]
        assert len(self.watchers) == len(self.pids)

    def end(self) -> str:
        """Until the launcher has ended; what was printed."""
        _, text = self.launcher.communicate(timeout=PATIENCE_S)
        assert self.launcher.returncode != 0
        return text

    def all_gone_within(self, seconds: float) -> bool:
        """Ranks, and the processes beside them."""
        ranks = [psutil.Process(pid) for pid in self.pids.values() if psutil.pid_exists(pid)]
        ranks = [rank for rank in ranks if "pipectl.runtime.worker" in " ".join(command(rank))]
        _, alive = psutil.wait_procs([*ranks, *self.watchers], timeout=seconds)
        return not alive

    def error(self) -> dict[str, Any]:
        """What was written down: of one rank only."""
        (found,) = read_errors(self.run)
        return found


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run directory with job, profile and plan, to be copied."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "job.yaml").write_text(yaml.safe_dump(document()))
    spec = load(folder / "job.yaml")
    threads = torch.get_num_threads()
    profile = profile_job(spec)
    torch.set_num_threads(threads)
    run = RunDirectory.create(folder / "runs", spec.name, 0.0)
    run.job.write_text(dump(spec))
    profile.save(run.profile)
    request = PlanRequest(spec.name, 2, micro_batches=2, stages=RANKS)
    make_plan(profile, assumed_cluster("here", [RANKS], RANKS, None), request).save(run.plan)
    return run


@pytest.fixture
def begin(prepared: RunDirectory, tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """``begin(base, **sections)``: a run of its own, training."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    mpiexec = str(beside) if beside.exists() else "mpiexec"
    numbers = count()
    started: list[Ranks] = []

    def start(base: Path | None = None, **sections: Any) -> Ranks:
        path = (base or tmp_path) / f"run-{next(numbers)}"
        shutil.copytree(prepared.path, path)
        run = RunDirectory(path)
        if sections:
            changed = {**document(), **sections}
            (tmp_path / "changed.yaml").write_text(yaml.safe_dump(changed))
            run.job.write_text(dump(load(tmp_path / "changed.yaml")))
        worker = [sys.executable, "-m", "mpi4py", "-m", "pipectl.runtime.worker", "--run"]
        launcher = subprocess.Popen(
            [mpiexec, "-n", str(RANKS), *worker, str(path)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PIPECTL_RUN_DIRECTORY": str(path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Ranks(run, launcher))
        return started[-1]

    yield start
    for ranks in started:
        ranks.launcher.kill()
        ranks.launcher.wait()
