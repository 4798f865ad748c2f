"""Run directories shared by the tests of a module, and ranks that can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipectl.cluster import assumed_cluster
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.spec import JobSpec, dump, load

PARTS = Path(__file__).parent.parent / "job_parts.py"


def document(ranks: int, sections: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": 1,
        "name": "job",
        "site_defaults": False,
        "model": {"factory": f"{PARTS}:Model", "kwargs": {"depth": 3, "dropout": 0.2}},
        "loss": {"factory": f"{PARTS}:loss", "weight": f"{PARTS}:valid"},
        "data": {"factory": f"{PARTS}:Samples"},
        "optimizer": {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.1}},
        "training": {"steps": 5, "batch_size": 4},
        "resources": {"tasks_per_node": ranks},
        **sections,
    }


@pytest.fixture(scope="module")
def module_runs(
    tmp_path_factory: pytest.TempPathFactory, profile_of: Callable[[JobSpec], Profile]
) -> Callable[..., RunDirectory]:
    """``module_runs(ranks, sections, **request)``: a run directory with job, profile and plan."""
    folder, numbers = tmp_path_factory.mktemp("resumed"), count()
    profiles: dict[str, Profile] = {}

    def make(ranks: int, sections: dict[str, Any], **request: Any) -> RunDirectory:
        path = folder / f"{next(numbers)}.yaml"
        path.write_text(yaml.safe_dump(document(ranks, sections)))
        spec = load(path)
        key = f"{spec.training.precision} {spec.loss.factory}"
        if key not in profiles:  # what its data are makes no difference here
            profiles[key] = profile_of(spec)
        profile = profiles[key]
        cluster = assumed_cluster("here", [ranks], ranks, None)
        stages = ranks // (request.get("replicas") or 1)
        wanted = {"micro_batches": 2, "stages": stages, **request}
        run = RunDirectory.create(folder / "runs", spec.name, 0.0)
        run.job.write_text(dump(spec))
        profile.save(run.profile)
        make_plan(profile, cluster, PlanRequest(spec.name, 4, **wanted)).save(run.plan)
        return run

    return make


@pytest.fixture
def start(warm_python: str, mpiexec: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``start(ranks, run)``: workers, as a process that goes on by itself; see ``launch``."""
    started: list[subprocess.Popen[str]] = []

    def begin(ranks: int, run: RunDirectory, *, fresh: bool = False) -> subprocess.Popen[str]:
        python = sys.executable if fresh else warm_python
        worker = [python, "-m", "mpi4py", "-m", "pipectl.runtime.worker", "--run"]
        process = subprocess.Popen(
            [mpiexec, "-n", str(ranks), *worker, str(run.path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
