"""Metrics over held-out data: means weighted by samples, and objects that keep their own sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture import Slot
from pipectl.capture.slices import Rows
from pipectl.errors import CaptureError
from pipectl.runtime.evaluation import Metrics

GRAPH: Any = SimpleNamespace(
    loss="loss",
    outputs=("logits", 7),
    output_spec=pytree.tree_structure({"logits": 0, "length": 0}),
)
"""The part of an evaluation graph that metrics look at."""


class Seen:
    """A metric with a memory."""

    def __init__(self, result: Any = None) -> None:
        self.outputs: list[Any] = []
        self.result = result

    def update(self, outputs: Any, targets: Tensor) -> None:
        self.outputs.append(outputs)

    def compute(self) -> Any:
        return self.result or torch.tensor(float(len(self.outputs)))


def mean(outputs: Any, targets: Any) -> Tensor:
    assert outputs["length"] == 7
    return outputs["logits"].mean()


def evaluate(metrics: dict[str, Any], *batches: tuple[int, float]) -> dict[str, float]:
    """Over micro-batches of some samples, of some loss, which the logits equal."""
    found = Metrics(metrics, lambda *_: GRAPH)
    for size, loss in batches:
        results = {Slot("loss"): torch.tensor(loss), Slot("logits"): torch.full((size,), loss)}
        found.add(Rows.of(size), results, None)
    return found.result()


def test_losses_and_functions_are_weighed_by_samples_and_objects_begin_afresh() -> None:
    """Losses that are weighed by valid targets are in test_equal_trainings."""
    seen = Seen()
    for _ in range(2):
        found = evaluate({"mean": mean, "seen": seen}, (4, 1.0), (2, 4.0))
        assert found == {"loss": 2.0, "mean": 2.0, "seen": 2.0}
    assert seen.outputs == []


@pytest.mark.parametrize(
    ("metric", "what"),
    [
        (lambda outputs, targets: outputs["logits"], "a tensor of shape [4]"),
        (Seen("good"), "a str"),
    ],
)
def test_a_metric_that_gives_no_number_is_named(metric: Any, what: str) -> None:
    with pytest.raises(CaptureError) as raised:
        evaluate({"rows": metric}, (4, 1.0))
    expected = f"evaluation.metrics.rows: must give one number, but gave {what}"
    assert raised.value.message == expected
