"""Specs of jobs that are profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipectl.spec import JobSpec, load

THREADS = torch.get_num_threads()
MODELS = Path(__file__).with_name("models.py")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Profiling sets the number of threads of its process."""
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def spec_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., JobSpec]:
    """``spec_of(model, data, **sections)``: names of models.py, or with a colon."""

    def factory(name: Any) -> Any:
        return f"{MODELS}:{name}" if isinstance(name, str) and ":" not in name else name

    def make(model: Any = "Counted", data: Any = "Vectors", **more: Any) -> JobSpec:
        document = {
            "version": 1,
            "name": "profiled",
            "site_defaults": False,
            "model": factory(model),
            "loss": "torch.nn:CrossEntropyLoss",
            "data": factory(data),
            "training": {"steps": 1, "batch_size": 8},
            "pipeline": {"micro_batches": 2},
            **more,
        }
        path = tmp_path_factory.mktemp("profiled") / "job.yaml"
        path.write_text(yaml.safe_dump(document))
        return load(path)

    return make
