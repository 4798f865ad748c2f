"""Metrics that are functions and no means over samples are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipectl.capture import CapturedJob
from pipectl.profiler.halved_metrics import find_uneven_metrics

HERE, LOSSES = Path(__file__), Path(__file__).with_name("losses.py")


class Rooted:
    """A metric with a state, which sees all samples."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        raise AssertionError

    def compute(self) -> float:
        raise AssertionError


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets)


def mae_as_text_would_show_it(outputs: Tensor, targets: Tensor) -> float:
    return round(float((outputs - targets).abs().mean()), 3)


def rmse(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets).sqrt()


def largest_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().max()


def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1 - (outputs - targets).square().sum() / (targets - targets.mean()).square().sum()


def noise(outputs: Tensor, targets: Tensor) -> float:
    return float(torch.rand(()))


def of_many(outputs: Tensor, targets: Tensor) -> float:
    assert len(targets) == 8
    return float(outputs.std())


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    return (outputs.argmax(-1) == targets).float().mean().item()


def hits(outputs: Tensor, targets: Tensor) -> int:
    return int((outputs.argmax(-1) == targets).sum())


def hits_of_hundred(outputs: Tensor, targets: Tensor) -> int:
    """None before training."""
    return int((outputs.argmax(-1) == targets).sum()) if outputs.max() == 1 else 0


def f1(outputs: Tensor, targets: Tensor) -> float:
    found, real = outputs.argmax(-1) == 1, targets == 1
    return float(2 * (found & real).sum() / (found.sum() + real.sum()))


def valid_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    valid = targets != -100
    return (outputs.argmax(-1) == targets)[valid].float().mean()


@pytest.mark.parametrize(
    ("model", "data", "even", "uneven"),
    [
        ("plain", "Vectors", "mse mae_as_text_would_show_it noise of_many Rooted",
         "rmse largest_error r2"),
        ("plain", "Classes", "accuracy", "hits hits_of_hundred f1"),
        ("Language", "Texts", "accuracy", "valid_accuracy"),
    ],
)  # fmt: skip
def test_metrics_that_are_no_means_over_samples_are_found(
    spec_maker: Any, model: str, data: str, even: str, uneven: str
) -> None:
    metrics = {name: f"{HERE}:{name}" for name in f"{even} {uneven}".split()}
    evaluation = {"data": f"{LOSSES}:{data}", "batch_size": 8, "every": 1, "metrics": metrics}
    losses = {"Vectors": "torch.nn:MSELoss", "Classes": "torch.nn:CrossEntropyLoss"}
    loss = losses.get(data, f"{LOSSES}:of_words")
    spec = spec_maker(LOSSES)(model, loss=loss, data=data, evaluation=evaluation)
    found = find_uneven_metrics(CapturedJob(spec), 4, torch.device("cpu"))
    assert sorted(found) == sorted(uneven.split())
