"""Captured jobs of the models beside this file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipectl.capture import CapturedGraph, CapturedJob, Cut, build_stage
from pipectl.capture.batch import by_name
from pipectl.capture.slices import Span
from pipectl.spec import JobSpec

MODELS = Path(__file__).with_name("models.py")
JobMaker = Callable[..., CapturedJob]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    """As ranks have it; sums in several threads differ in bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_spec(spec_maker: Callable[[Path], Callable[..., JobSpec]]) -> Callable[..., JobSpec]:
    """``make_spec(model, loss=, data=, **sections)``: of models.py, gpt, tied, cnn or dense."""
    return spec_maker(MODELS)


MODULES = """\
import contextlib, ctypes, functools, itertools, os, random, tempfile, types
from collections import deque
from random import random as draw
import numpy as np
import torch
from torch import nn

GENERATOR = np.random.default_rng(0)
STEPS, MEAN, LAST, WIDTH, TABLE = 0, torch.zeros(6), None, 0, None
COUNTS, STATE = {"a": 0}, types.SimpleNamespace(calls=0)
QUEUE, ARRAY, NUMBERS = deque(maxlen=4), np.zeros(1), itertools.count(1)

def noise(generator=np.random.default_rng(0)):
    return generator.random()

class Meter:
    calls = 0

def count_from(n):
    def count():
        nonlocal n
        n += 1
        return n
    return count

count = count_from(0)

@functools.lru_cache
def table(size):
    return torch.arange(size)
"""
MODULE = """
class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.kept = {first}
    def forward(self, x):
        x = self.linear(x)
        {code}
        return x

class Whole{name}({name}):
    def forward(self, x):
        return super().forward(x)[:, :3]
"""


@pytest.fixture
def write_modules(tmp_path: Path) -> Callable[..., Path]:
    """``write_modules(table)``: a file with modules by name, and a model of all of them.

    The table has what each keeps and its code, or its code alone. ``Whole...`` are models whose own
    code it is; ``layers`` has the modules between a first and a last layer.
    """

    def write(table: dict[str, Any], more: str = "") -> Path:
        entries = {n: ("None", v) if isinstance(v, str) else v for n, v in table.items()}
        modules = [
            MODULE.format(name=name, first=first, code=code.replace("\n", "\n        "))
            for name, (first, code) in entries.items()
        ]
        layers = ", ".join(["nn.Linear(6, 6)", *(f"{name}()" for name in entries)])
        last = f"def layers():\n    return [{layers}, nn.Linear(6, 3)]\n"
        path = tmp_path / "modules.py"
        path.write_text("\n".join([MODULES, *modules, last, more]))
        return path

    return write


@pytest.fixture
def place_of() -> Callable[[Path, str], str]:
    """Where the first line of a module's code is, as errors name it: file, line and text."""

    def place(path: Path, code: str) -> str:
        first = code.partition("\n")[0]
        return f"(at {path}:{1 + path.read_text().splitlines().index(8 * ' ' + first)}: {first})"

    return place


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
def run_whole() -> Callable[..., Tensor]:
    """``run_whole(job, span)``: the loss of its graph as one stage, on some of the first samples
    of its data."""

    def run(
        job: CapturedJob, span: Span | int = 4, *, seed: int = 0, training: bool = True
    ) -> Tensor:
        span = Span.of(span) if isinstance(span, int) else span
        graph_of = job.training_graph if training else job.evaluation_graph
        graph = graph_of(span.whole, span.length)
        stage_of = {node.name: 0 for node in graph.operators}
        code = build_stage(Cut(graph, stage_of, training), 0, span)
        batch = by_name(graph, job.loader.example(span.whole, length=span.length))
        states = [job.states[graph.states[slot.value].name] for slot in code.states]
        inputs = (batch[name][span.start : span.stop] for name in code.inputs)
        return code.module(seed, *states, *inputs)[0]

    return run
