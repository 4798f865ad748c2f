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


@pytest.fixture
def make_spec(tmp_path: Path) -> Callable[..., JobSpec]:
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
        path = tmp_path / f"job-{ranks}.yaml"
        path.write_text(yaml.safe_dump(document))
        return load(path)

    return make


@pytest.fixture
def make_run(tmp_path: Path, run_in: Callable[..., RunDirectory]) -> Callable[..., RunDirectory]:
    """See ``run_in``."""
    return partial(run_in, tmp_path / "runs")
