"""Metrics over held-out data: means weighted by samples, and objects that keep their own sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture import Slot
from pipectl.capture.slices import Rows
from pipectl.errors import CaptureError, WorkerError
from pipectl.runtime.evaluation import Metrics


class Graph:
    """The part of an evaluation graph that metrics look at."""

    loss = "loss"
    outputs = ("logits", 7)
    output_spec = pytree.tree_structure({"logits": 0, "length": 0})


class Seen:
    """A metric with a memory."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def update(self, outputs: Any, targets: Tensor) -> None:
        self.outputs.append(outputs)

    def compute(self) -> Tensor:
        return torch.tensor(float(len(self.outputs)))


def results(loss: float, logits: Tensor) -> dict[Slot, Tensor | None]:
    return {Slot("loss"): torch.tensor(loss), Slot("logits"): logits}


def fed(metrics: dict[str, Any]) -> Metrics:
    found = Metrics(metrics, lambda *_: Graph())  # type: ignore[arg-type, return-value]
    found.add(Rows.of(4), results(1.0, torch.ones(4)), torch.zeros(4))
    found.add(Rows.of(2), results(4.0, torch.full((2,), 3.0)), torch.zeros(2))
    return found


def test_the_loss_is_weighed_as_in_training_and_what_has_no_weight_is_left_out() -> None:
    """Of padding alone a loss is NaN; metrics count samples all the same."""
    found = Metrics(
        {"one": lambda outputs, targets: outputs["logits"].mean()}, lambda *_: Graph(), float
    )  # type: ignore[arg-type, return-value]
    for size, loss, valid in ((4, 1.0, 1.0), (2, math.nan, 0.0), (2, 4.0, 5.0)):
        found.add(Rows.of(size), results(loss, torch.full((size,), loss)), valid)
    result = found.result()
    assert result["loss"] == (1.0 * 1 + 4.0 * 5) / 6
    assert math.isnan(result["one"])
    assert list(result) == ["loss", "one"]


def test_without_any_weight_there_is_no_loss() -> None:
    found = Metrics({}, lambda *_: Graph(), lambda targets: 0.0)  # type: ignore[arg-type, return-value]
    found.add(Rows.of(4), results(math.nan, torch.ones(4)), torch.zeros(4))
    assert math.isnan(found.result()["loss"])


def test_loss_and_functions_are_weighed_by_samples_and_get_the_models_structure() -> None:
    def mean(outputs: Any, targets: Tensor) -> Tensor:
        assert outputs["length"] == 7
        return outputs["logits"].mean()

    found = fed({"mean": mean}).result()
    assert found == {"loss": (4 * 1.0 + 2 * 4.0) / 6, "mean": pytest.approx((4 + 2 * 3.0) / 6)}


def test_every_evaluation_starts_from_a_fresh_object() -> None:
    metric = Seen()
    assert [fed({"seen": metric}).result()["seen"] for _ in range(2)] == [2.0, 2.0]
    assert metric.outputs == []


def test_a_metric_that_raises_is_named() -> None:
    def broken(outputs: Any, targets: Tensor) -> Tensor:
        raise KeyError("logit")

    with pytest.raises(WorkerError) as raised:
        fed({"broken": broken})
    assert raised.value.exit_code == 1
    assert raised.value.message.startswith("evaluation.metrics.broken: raised KeyError: 'logit'")


def test_a_metric_that_gives_no_number_is_named() -> None:
    with pytest.raises(CaptureError) as raised:
        fed({"rows": lambda outputs, targets: outputs["logits"]})
    assert raised.value.message == (
        "evaluation.metrics.rows: must give one number, but gave a tensor of shape [4]"
    )


def test_an_object_that_gives_no_number_is_named() -> None:
    class Text(Seen):
        def compute(self) -> str:  # type: ignore[override]
            return "good"

    with pytest.raises(CaptureError) as raised:
        fed({"text": Text()}).result()
    assert raised.value.message == "evaluation.metrics.text: must give one number, but gave a str"
