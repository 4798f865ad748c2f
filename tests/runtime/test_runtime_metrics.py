"""Metrics over held-out data: means weighted by samples, and objects that keep their own sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture import Slot
from pipectl.capture.slices import Rows
from pipectl.errors import CaptureError
from pipectl.runtime.evaluation import Metrics


class Graph:
    """The part of an evaluation graph that metrics look at."""

    loss = "loss"
    outputs = ("logits", 7)
    output_spec = pytree.tree_structure({"logits": 0, "length": 0})


class Seen:
    """A metric with a memory."""

    def __init__(self, result: Callable[[list[Any]], Any]) -> None:
        self.outputs: list[Any] = []
        self.result = result

    def update(self, outputs: Any, targets: Tensor) -> None:
        self.outputs.append(outputs)

    def compute(self) -> Any:
        return self.result(self.outputs)


def mean(outputs: Any, targets: Any) -> Tensor:
    assert outputs["length"] == 7
    return outputs["logits"].mean()


def evaluate(
    metrics: dict[str, Any], batches: tuple[tuple[int, float, Any], ...], weigh: Any = None
) -> dict[str, float]:
    """Over micro-batches of some samples, of some loss, which the logits equal, and targets."""
    found = Metrics(metrics, lambda *_: Graph(), weigh)
    for size, loss, targets in batches:
        results = {Slot("loss"): torch.tensor(loss), Slot("logits"): torch.full((size,), loss)}
        found.add(Rows.of(size), results, targets)
    return found.result()


def test_losses_and_functions_are_weighed_by_samples_and_objects_begin_afresh() -> None:
    seen = Seen(lambda outputs: torch.tensor(float(len(outputs))))
    for _ in range(2):
        found = evaluate({"mean": mean, "seen": seen}, ((4, 1.0, None), (2, 4.0, None)))
        assert found == {"loss": 2.0, "mean": 2.0, "seen": 2.0}
    assert seen.outputs == []


def test_the_loss_is_weighed_as_in_training_and_what_has_no_weight_is_left_out() -> None:
    """Of padding alone a loss is NaN; metrics count samples all the same."""
    batches = ((4, 1.0, 1.0), (2, math.nan, 0.0), (2, 4.0, 5.0))
    result = evaluate({"mean": mean}, batches, weigh=float)
    assert result["loss"] == (1.0 * 1 + 4.0 * 5) / 6
    assert math.isnan(result["mean"])
    assert list(result) == ["loss", "mean"]
    assert math.isnan(evaluate({}, batches[1:2], weigh=float)["loss"])


@pytest.mark.parametrize(
    ("metric", "what"),
    [
        (lambda outputs, targets: outputs["logits"], "a tensor of shape [4]"),
        (Seen(lambda outputs: "good"), "a str"),
    ],
)
def test_a_metric_that_gives_no_number_is_named(metric: Any, what: str) -> None:
    with pytest.raises(CaptureError) as raised:
        evaluate({"rows": metric}, ((4, 1.0, None),))
    expected = f"evaluation.metrics.rows: must give one number, but gave {what}"
    assert raised.value.message == expected
