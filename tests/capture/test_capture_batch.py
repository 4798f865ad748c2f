"""Batches by name: tensors and numbers are the graph's, all else is nobody's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipectl.capture.batch import Reader, by_name
from pipectl.errors import CaptureError

DIFFERS = "a batch differs from the training batch that was captured"


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


def test_a_number_must_stay_what_it_was_when_it_was_captured(job: Any) -> None:
    reader = Reader(job.training_graph(4))
    reader.check(reader.read(job.loader.example(4)), 4, (), is_whole=True)
    with pytest.raises(CaptureError, match=r"^data: 'targets_count' .* number 2, .* with 4, and"):
        reader.check(reader.read(job.loader.example(2)), 2, (), is_whole=True)


def test_tensors_are_found_by_their_keys_in_any_order(job: Any) -> None:
    inputs, targets = job.loader.example(4)
    graph = job.training_graph(4)
    reversed_targets = dict(reversed(targets.items()))
    assert list(reversed_targets) != list(targets)
    found = by_name(graph, [inputs, reversed_targets])
    expected = by_name(graph, (inputs, targets))
    assert list(found) == list(expected)
    assert all(found[name] is value for name, value in expected.items())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": torch.zeros(4)}, "tensor targets['more'] is new"),
        (
            {"count": torch.zeros(4)},
            "number targets['count'] is missing, tensor targets['count'] is new",
        ),
        (
            {"id": None, "label": torch.zeros(4)},
            "tensor targets['id'] is missing, tensor targets['label'] is new",
        ),
        (
            {"boxes": [1, 2, 3, 4, 5]},
            "number targets['boxes'][0] is new, number targets['boxes'][1] is new, "
            "number targets['boxes'][2] is new, and 2 more",
        ),
    ],
)
def test_other_tensors_or_numbers_are_refused(
    job: Any, change: dict[str, Any], message: str, training: bool
) -> None:
    inputs, targets = job.loader.example(4)
    with pytest.raises(CaptureError) as raised:
        by_name(job.training_graph(4), (inputs, {**targets, **change}), training=training)
    section = "data" if training else "evaluation.data"
    assert raised.value.message == f"{section}: {DIFFERS}: {message}"


def test_named_tuples_and_lists_are_taken_apart(make_job: Any) -> None:
    job = make_job("mlp", data="Marked", loss="mean_by_mark")
    inputs, marks = job.loader.example(3)
    found = by_name(job.training_graph(4), (inputs, marks._replace(boxes=tuple(marks.boxes))))
    expected = [inputs, marks.y, marks.boxes[0], marks.boxes[1]["weight"]]
    assert [id(value) for value in found.values()] == [id(value) for value in expected]


def test_texts_and_numbers_are_no_part_of_the_model(make_job: Any) -> None:
    """A profile and a run may have captured batches of different sizes."""
    names = "mlp", "Described", "mean_by_y"
    graphs = [make_job(names[0], data=names[1], loss=names[2]).training_graph(n) for n in (4, 6)]
    assert not graphs[0].fixed
    assert graphs[0].fingerprint == graphs[1].fingerprint
