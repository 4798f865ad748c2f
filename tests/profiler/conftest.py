"""Specs of jobs that are profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.runtime.device import set_arithmetic
from pipectl.spec import JobSpec
from pipectl.spec.models import Training

THREADS = torch.get_num_threads()
MODELS = Path(__file__).with_name("models.py")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Profiling sets the number of threads of its process, and how it computes."""
    yield
    torch.set_num_threads(THREADS)
    set_arithmetic(Training(steps=1, batch_size=1))


@pytest.fixture(scope="session")
def spec_of(spec_maker: Any) -> Callable[..., JobSpec]:
    """``spec_of(model, **sections)``: names of models.py, or with a colon."""
    make = spec_maker(MODELS)
    usual = {"pipeline": {"micro_batches": 2}}
    return lambda model="Counted", **more: make(model, **{**usual, **more})
