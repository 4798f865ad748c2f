"""A small job, and run directories made as the commands make them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipectl.runs import RunDirectory
from pipectl.spec import JobSpec, load

PARTS = Path(__file__).with_name("job_parts.py")


def spec_in(
    folder: Path, ranks: int, data: dict[str, Any] | None = None, **sections: Any
) -> JobSpec:
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
    path = folder / f"job-{ranks}.yaml"
    path.write_text(yaml.safe_dump(document))
    return load(path)


@pytest.fixture
def make_spec(tmp_path: Path) -> Callable[..., JobSpec]:
    """``make_spec(ranks, data={...}, **sections)``: four samples a step in two micro-batches."""
    return partial(spec_in, tmp_path)


@pytest.fixture
def make_run(tmp_path: Path, run_in: Callable[..., RunDirectory]) -> Callable[..., RunDirectory]:
    """See ``run_in``."""
    return partial(run_in, tmp_path / "runs")


@pytest.fixture(scope="session")
def trained_alone(
    tmp_path_factory: pytest.TempPathFactory,
    run_in: Callable[..., RunDirectory],
    train: Callable[..., None],
) -> RunDirectory:
    """A run of the small job on one rank, at its end; not to be changed."""
    folder = tmp_path_factory.mktemp("alone")
    run = run_in(folder / "runs", spec_in(folder, 1))
    train(run)
    return run
