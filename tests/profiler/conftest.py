"""Specs of jobs that are profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.spec import JobSpec

THREADS = torch.get_num_threads()
MODELS = Path(__file__).with_name("models.py")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Profiling sets the number of threads of its process."""
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def spec_of(spec_maker: Any) -> Callable[..., JobSpec]:
    """``spec_of(model, **sections)``: names of models.py, or with a colon."""
    make = spec_maker(MODELS)
    usual = {"pipeline": {"micro_batches": 2}}
    return lambda model="Counted", **more: make(model, **{**usual, **more})
