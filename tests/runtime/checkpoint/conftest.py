"""Run directories shared by the tests of a module, and ranks that can be killed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipectl.runs import RunDirectory
from pipectl.spec import load

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
    tmp_path_factory: pytest.TempPathFactory, run_in: Callable[..., RunDirectory]
) -> Callable[..., RunDirectory]:
    """``module_runs(ranks, sections, **pipeline)``: a run directory with job, profile and plan."""
    folder, numbers = tmp_path_factory.mktemp("resumed"), count()

    def make(ranks: int, sections: dict[str, Any], **pipeline: Any) -> RunDirectory:
        stages = ranks // (pipeline.get("replicas") or 1)
        pipeline = {"micro_batches": 2, "stages": stages, **pipeline}
        path = folder / f"{next(numbers)}.yaml"
        path.write_text(yaml.safe_dump({**document(ranks, sections), "pipeline": pipeline}))
        return run_in(folder / "runs", load(path))

    return make


@pytest.fixture
def start(warm_python: str, mpiexec: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``start(ranks, run)``: workers, as a process that goes on by itself; see ``launch``."""
    started: list[subprocess.Popen[str]] = []

    def begin(ranks: int, run: RunDirectory) -> subprocess.Popen[str]:
        worker = [warm_python, "-m", "mpi4py", "-m", "pipectl.runtime.worker", "--run"]
        process = subprocess.Popen(
            [mpiexec, "-n", str(ranks), *worker, str(run.path)],
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
