"""Captured jobs of the models beside this file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipectl.capture import CapturedGraph, CapturedJob
from pipectl.spec import JobSpec, load

MODELS = Path(__file__).with_name("models.py")
EQUALITY = Path(__file__).parents[1] / "equality" / "models.py"
JobMaker = Callable[..., CapturedJob]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    """As ranks have it; sums in several threads differ in bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_spec(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., JobSpec]:
    """``make_spec(model, loss=, data=, **sections)``: names of models.py or with a colon.

    ``kwargs``, ``materialize``, ``opaque`` and ``weights`` are those of the model.
    """

    def make(
        model: str, *, loss: str = "torch.nn:CrossEntropyLoss", data: Any = "Vectors", **more: Any
    ) -> JobSpec:
        keys = more.keys() & {"materialize", "opaque", "weights"}
        options = {key: more.pop(key) for key in keys}
        document = {
            "version": 1,
            "name": "job",
            "site_defaults": False,
            "model": {**_factory(model, more.pop("kwargs", {})), **options},
            "loss": _factory(loss, more.pop("loss_kwargs", {})),
            "data": _factory(data, more.pop("data_kwargs", {})),
            "training": {"steps": 1, "batch_size": 8},
            **more,
        }
        path = tmp_path_factory.mktemp("spec") / "job.yaml"
        path.write_text(yaml.safe_dump(document))
        return load(path)

    return make


def _factory(name: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    if isinstance(name, dict):
        return name
    place = name if ":" in name or name == "model" else f"{MODELS}:{name}"
    return {"factory": place, "kwargs": kwargs} if kwargs else {"factory": place}


@pytest.fixture(scope="session")
def make_job(make_spec: Callable[..., JobSpec]) -> JobMaker:
    """A job of its own."""
    return lambda *args, **kwargs: CapturedJob(make_spec(*args, **kwargs))


@pytest.fixture(scope="session")
def job_of(make_job: JobMaker) -> Callable[[str], CapturedJob]:
    """The job of a model, shared by all tests, which must leave it as it was."""
    return cache(make_job)


@pytest.fixture(scope="session")
def graph_of(job_of: Callable[[str], CapturedJob]) -> Callable[[str], CapturedGraph]:
    """The training graph of a model for micro-batches of 4."""
    return lambda name: job_of(name).training_graph(4)


@pytest.fixture(scope="session")
def make_real_job(make_job: JobMaker) -> JobMaker:
    """A job of its own of a model of the equality table: gpt, tied, cnn or dense."""

    def make(name: str, **more: Any) -> CapturedJob:
        tokens = name in ("gpt", "tied")
        loss = f"{EQUALITY}:token_loss" if tokens else "torch.nn:CrossEntropyLoss"
        data = f"{EQUALITY}:{'Tokens' if tokens else 'Images'}"
        return make_job(f"{EQUALITY}:{name}", loss=loss, data=data, **more)

    return make


@pytest.fixture(scope="session")
def real_job(make_real_job: JobMaker) -> Callable[[str], CapturedJob]:
    """The same, shared by all tests, which must leave it as it was."""
    return cache(make_real_job)
