"""A small job, and run directories made as the commands make them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipectl.runs import RunDirectory
from pipectl.spec import JobSpec, load
from tests.equality import outcome

PARTS = Path(__file__).with_name("job_parts.py")


@pytest.fixture(scope="session")
def make_spec(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., JobSpec]:
    """``make_spec(ranks, data={...}, **sections)``: four samples a step in two micro-batches."""

    def make(ranks: int, data: dict[str, Any] | None = None, **sections: Any) -> JobSpec:
        document = {
            "version": 1,
            "name": "job",
            "site_defaults": False,
            "model": {"factory": f"{PARTS}:Model"},
            "loss": {"factory": f"{PARTS}:loss", "weight": f"{PARTS}:valid"},
            "data": {"factory": f"{PARTS}:Samples", "shuffle": False, **(data or {})},
            "optimizer": {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.1}},
            "training": {"steps": 5, "batch_size": 4, "clip_grad_norm": 1.0},
            "pipeline": {"micro_batches": 2, "stages": ranks},
            "resources": {"tasks_per_node": ranks},
            **sections,
        }
        path = tmp_path_factory.mktemp("job") / "job.yaml"
        path.write_text(yaml.safe_dump(document))
        return load(path)

    return make


@pytest.fixture(scope="session")
def make_run(
    make_spec: Callable[..., JobSpec],
    run_in: Callable[..., RunDirectory],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., RunDirectory]:
    """``make_run(ranks, data={...}, **sections)``: a run of such a job, with profile and plan."""

    def make(*given: Any, **sections: Any) -> RunDirectory:
        return run_in(tmp_path_factory.mktemp("runs"), make_spec(*given, **sections))

    return make


@pytest.fixture(scope="session")
def trained_alone(make_run: Callable[..., RunDirectory], train) -> RunDirectory:
    """A run of the small job on one rank, at its end; not to be changed."""
    run = make_run(1)
    train(run)
    return run


@pytest.fixture(scope="session")
def different() -> Callable[[RunDirectory, RunDirectory], list[str]]:
    """``different(run, other)``: what differs in the weights of their newest checkpoints."""

    def compare(*runs: RunDirectory) -> list[str]:
        return outcome.different(*(outcome.weights(run.path) for run in runs))

    return compare


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``disk(size)``: a file system of that size, which takes the right to mount one."""
    directory = tmp_path / "disk"
    directory.mkdir()

    def mount(size: str) -> Path:
        if shutil.which("mount") is None:
            pytest.skip("no mount")
        command = ["mount", "-t", "tmpfs", "tmpfs", str(directory), "-o", f"size={size}"]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
        return directory

    yield mount
    if directory.is_mount():
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
