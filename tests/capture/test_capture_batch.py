"""Batches by name: tensors and numbers are the graph's, all else is nobody's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipectl.capture.batch import by_name
from pipectl.errors import CaptureError


@pytest.fixture(scope="module")
def job(make_job: Any) -> Any:
    return make_job("mlp", data="Described", loss="mean_by_count")


@pytest.mark.parametrize("size", [1, 4, 6])
def test_a_batch_may_hold_any_number_of_texts(job: Any, size: int) -> None:
    found = by_name(job.training_graph(4), job.loader.example(size))
    shapes = {name: getattr(value, "shape", value) for name, value in found.items()}
    assert shapes == {
        "inputs": (size, 6),
        "targets_y": (size,),
        "targets_id": (size, 2),
        "targets_count": size,
    }


def test_numbers_are_those_of_the_batch_that_was_captured(job: Any) -> None:
    assert job.training_graph(4).inputs["targets_count"] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": torch.zeros(4)}, "holds 4 tensors, the one that was captured 3"),
        ({"count": torch.zeros(4)}, "holds 4 tensors, the one that was captured 3"),
        ({"further": 3}, "holds 2 numbers, the one that was captured 1"),
    ],
)
def test_other_tensors_or_numbers_are_refused(
    job: Any, change: dict[str, Any], message: str
) -> None:
    inputs, targets = job.loader.example(4)
    with pytest.raises(CaptureError) as raised:
        by_name(job.training_graph(4), (inputs, {**targets, **change}))
    assert raised.value.message == f"data: a batch {message}"


def test_texts_and_numbers_are_no_part_of_the_model(make_job: Any) -> None:
    """A profile and a run may have captured batches of different sizes."""
    names = "mlp", "Described", "mean_by_y"
    graphs = [make_job(names[0], data=names[1], loss=names[2]).training_graph(n) for n in (4, 6)]
    assert not graphs[0].fixed
    assert graphs[0].fingerprint == graphs[1].fingerprint
