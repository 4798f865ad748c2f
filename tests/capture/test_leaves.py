"""What batches hold besides tensors: taken apart, ignored, or refused if a model looks at it."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipectl.capture import CapturedJob
from pipectl.capture.batch import by_name
from pipectl.errors import CaptureError

HERE = Path(__file__)


class Side(Enum):
    LEFT = 1
    RIGHT = 2


@dataclasses.dataclass
class Weighted:
    weight: Tensor
    factor: float = 2.0


class Attributes(dict):
    """As many packages have it: keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Encoding(UserDict):
    """As tokenizers return it."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Numbered(UserDict):
    """Is not made of a dict alone."""

    def __init__(self, number: int, content: Any) -> None:
        super().__init__(content)
        self.number = number


class Rows(list):
    """Samples, each with something beside its target."""

    def __init__(self, kind: str) -> None:
        super().__init__((torch.full((6,), float(i)), torch.tensor(i % 3)) for i in range(12))
        self.kind = kind

    def collate_fn(self, samples: Any) -> Any:
        x, y = map(torch.stack, zip(*samples, strict=True))
        return x, {"y": y, "beside": BESIDE[self.kind](x[:, 0])}


BESIDE: dict[str, Callable[[Tensor], Any]] = {
    "array": lambda w: w.numpy(),
    "number of numpy": lambda w: np.int64(w[0]),
    "complex": lambda w: complex(w[0]),
    "bytes": lambda w: b"ab",
    "path": lambda w: [Path("a") for _ in w],
    "date": lambda w: date(2020, 1, 1),
    "set": lambda w: {1},
    "type": lambda w: torch.float64,
    "side": lambda w: Side.LEFT if w[0] else Side.RIGHT,
    "dataclass": lambda w: Weighted(w),
    "attributes": lambda w: Attributes(weight=w),
    "encoding": lambda w: Encoding(weight=w),
    "numbered": lambda w: Numbered(1, {"weight": w}),
    "nested": lambda w: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "within": lambda w: [Encoding(inner=(Weighted(w), Attributes(weight=w)))],
}


def ignore(outputs: Tensor, targets: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets["y"])


def read(outputs: Tensor, targets: Any) -> Tensor:
    beside, loss = targets["beside"], ignore(outputs, targets)
    if isinstance(beside, np.ndarray):
        return loss * torch.from_numpy(beside).mean()
    if isinstance(beside, complex):
        return loss * beside.real
    if isinstance(beside, Side):
        return 2 * loss if beside is Side.LEFT else loss
    if isinstance(beside, list):
        return loss * len(beside[0].name)
    if isinstance(beside, date):
        return loss * beside.day
    if isinstance(beside, torch.dtype):
        return loss * beside.itemsize
    return loss * (len(beside) if isinstance(beside, bytes | set) else int(beside))


def of_attribute(outputs: Tensor, targets: Any) -> Tensor:
    return ignore(outputs, targets) * targets["beside"].weight.mean()


def of_key(outputs: Tensor, targets: Any) -> Tensor:
    return ignore(outputs, targets) * targets["beside"]["weight"].mean()


def of_within(outputs: Tensor, targets: Any) -> Tensor:
    one, other = targets["beside"][0].inner
    return ignore(outputs, targets) * (one.weight + other.weight).mean()


@pytest.fixture
def job(make_job: Callable[..., CapturedJob]) -> Callable[[str, str], CapturedJob]:
    """``job(kind, loss)``"""

    def make(kind: str, loss: str) -> CapturedJob:
        data = {"factory": f"{HERE}:Rows", "kwargs": {"kind": kind}}
        return make_job("mlp", loss=f"{HERE}:{loss}", data=data)

    return make


OBJECTS = ["array", "number of numpy", "complex", "bytes", "path", "date", "set", "type", "side"]


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_batch_may_hold_any_object_that_nobody_looks_at(job: Any, kind: str) -> None:
    made = job(kind, "ignore")
    graph = made.training_graph(4)
    found = by_name(graph, made.loader.example(3))
    assert [name for name, value in found.items() if isinstance(value, Tensor)] == [
        "inputs",
        "targets_y",
    ]


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_model_that_looks_at_an_object_is_refused_at_its_line(job: Any, kind: str) -> None:
    """A graph would hold that of the batch that was captured."""
    with pytest.raises(CaptureError, match=r"^model: computes with (an object|the texts) of") as it:
        job(kind, "read").training_graph(4)
    assert f"{HERE}:" in it.value.message
    assert "let the dataset" in str(it.value.hint)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("dataclass", "of_attribute"),
        ("attributes", "of_attribute"),
        ("attributes", "of_key"),
        ("encoding", "of_attribute"),
        ("encoding", "of_key"),
        ("numbered", "of_key"),
        ("within", "of_within"),
    ],
)
def test_dataclasses_and_mappings_of_all_kinds_are_taken_apart(
    job: Any, kind: str, loss: str
) -> None:
    """Each batch has its own values, and the loss is that of the batch."""
    made = job(kind, loss)
    graph = made.training_graph(4)
    for first in (0, 4):
        batch = made.loader.example(3, first)
        found = [v for v in by_name(graph, batch).values() if isinstance(v, Tensor)]
        assert any(torch.equal(value, batch[0][:, 0]) for value in found[2:])


def test_a_nested_tensor_is_refused(job: Any) -> None:
    with pytest.raises(CaptureError, match=r"has a nested tensor.*\n.*pad samples"):
        job("nested", "ignore").training_graph(2)
