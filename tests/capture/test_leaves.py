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


OTHERS: dict[str, Callable[[int], Any]] = {
    "text": lambda n: "a",
    "none": lambda n: None,
    "object": lambda n: {1},
    "texts": lambda n: ["a"] * n,
    "no texts": lambda n: [],
    "more texts": lambda n: ("a",) * (n + 1),
    "objects": lambda n: [{1}] * n,
    "some": lambda n: [None] * n,
    "key": lambda n: {"k": "a", "w": "b"},
    "no key": lambda n: {"w": "b"},
}


class Changing(Rows):
    """Has one kind of item in the first four samples, and another one behind."""

    def collate_fn(self, samples: Any) -> Any:
        x, y = map(torch.stack, zip(*samples, strict=True))
        first, second = self.kind.split(", ")
        return x, {"y": y, "beside": OTHERS[second if x[0, 0] >= 4 else first](len(x))}


def by_none(outputs: Tensor, targets: Any) -> Tensor:
    return ignore(outputs, targets) * (1 if targets["beside"] is None else 2)


def by_type(outputs: Tensor, targets: Any) -> Tensor:
    return ignore(outputs, targets) * (1 if isinstance(targets["beside"], str) else 2)


def by_count(outputs: Tensor, targets: Any) -> Tensor:
    total = nn.functional.cross_entropy(outputs, targets["y"], reduction="sum")
    return total / (1 + len(targets["beside"]))


def by_truth(outputs: Tensor, targets: Any) -> Tensor:
    return ignore(outputs, targets) * (2 if targets["beside"] else 1)


def by_first(outputs: Tensor, targets: Any) -> Tensor:
    return ignore(outputs, targets) * (2 if targets["beside"][0] is None else 1)


def by_key(outputs: Tensor, targets: Any) -> Tensor:
    return ignore(outputs, targets) * (2 if "k" in targets["beside"] else 1)


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


class Asked(Changing):
    """The model gets the item, too."""

    def collate_fn(self, samples: Any) -> Any:
        x, targets = super().collate_fn(samples)
        return {"x": x, "beside": targets["beside"]}, targets


class Deciding(nn.Module):
    """Decides by a value, so that it is kept whole, and by what is beside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor, beside: Any) -> Tensor:
        found = self.linear(x)
        return found * 3 if found.sum() > 1e6 else found * (1 if beside is None else 2)


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Deciding()

    def forward(self, x: Tensor, beside: Any) -> Tensor:
        return self.inner(x, beside).tanh()


@pytest.fixture
def job(make_job: Callable[..., CapturedJob]) -> Callable[..., CapturedJob]:
    """``job(kind, loss, data)``"""

    def make(kind: str, loss: str, data: str = "Rows") -> CapturedJob:
        data = {"factory": f"{HERE}:{data}", "kwargs": {"kind": kind}}
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


ALIKE = [
    ("none, text", "by_none", "is a text, not None"),
    ("text, none", "by_none", "is None, not a text"),
    ("texts, more texts", "by_count", "is 5 in a tuple of a text, not 4 in a list of a text"),
    ("key, no key", "by_key", r"\['k'\] is missing, which was a text"),
    ("no key, key", "by_key", r"\['k'\] is new"),
    ("none, text", "ignore", None),
    ("texts, no texts", "ignore", None),
]
FURTHER_ALIKE = [
    ("none, text", "by_type", "is a text, not None"),
    ("none, object", "by_truth", "is a set, not None"),
    ("object, none", "by_type", "is None, not a set"),
    ("object, none", "by_none", "is None, not a set"),
    ("text, object", "by_type", "is a set, not a text"),
    ("objects, no texts", "by_truth", "is 0 in a list, not 4 in a list of a set"),
    ("texts, some", "by_first", "is 4 in a list of None, not 4 in a list of a text"),
    ("text, object", "ignore", None),
    ("objects, some", "ignore", None),
    ("key, no key", "ignore", None),
]


@pytest.mark.parametrize(
    ("kinds", "loss", "words"),
    [*ALIKE, *(pytest.param(*each, marks=pytest.mark.product) for each in FURTHER_ALIKE)],
)
def test_batches_must_be_alike_in_what_a_graph_depends_on(
    job: Any, kinds: str, loss: str, words: str | None
) -> None:
    """Whether there is a text, None or an object, how many, and under which keys."""
    made = job(kinds, loss, "Changing")
    graph = made.training_graph(4)
    by_name(graph, made.loader.example(4))
    other = made.loader.example(4, 4)
    if words is None:
        by_name(graph, other)
        return
    with pytest.raises(CaptureError, match=rf"^data: a batch differs from .*beside.*{words}"):
        by_name(graph, other)


def test_a_number_of_texts_in_place_of_that_of_samples_is_found_in_the_profile(job: Any) -> None:
    """The last micro-batch of an epoch is smaller."""
    with pytest.raises(CaptureError, match=r"is 2 in a list.*\n.*from a tensor \(len\(x\)\)"):
        job("texts, texts", "by_count", "Changing").check_shapes(3)
    job("texts, texts", "by_count", "Changing").check_shapes(4)


def test_a_submodule_that_is_kept_whole_may_not_get_none_and_texts_in_turn(make_job: Any) -> None:
    data = {"factory": f"{HERE}:Asked", "kwargs": {"kind": "none, text"}}
    made = make_job(f"{HERE}:Kept", loss=f"{HERE}:ignore", data=data)
    graph = made.training_graph(4)
    assert made.kept
    with pytest.raises(CaptureError, match="is a text, not None"):
        by_name(graph, made.loader.example(4, 4))
