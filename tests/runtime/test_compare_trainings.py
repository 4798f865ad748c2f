"""Where two trainings differ, and by how much, on trainings made up for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipectl.capture import CapturedJob
from pipectl.capture.tensors import is_deferred
from pipectl.runtime.compare import Trained, compare, distance
from pipectl.runtime.plain import FirstWeights

START = {"a": torch.zeros(3), "b": torch.ones(2, 2)}


def made(changes: dict[tuple[int, str], float], missing: str = "") -> Trained:
    """Step k has a = k and b = 1 + k, plus what a test changes."""

    def weights(step: int) -> dict[str, Tensor]:
        found = {name: first + step for name, first in START.items() if name != missing}
        for name, tensor in found.items():
            tensor.view(-1)[-1] += changes.get((step, name), 0.0)
        return found

    return Trained({s: 10.0 / s + changes.get((s, "loss"), 0.0) for s in (1, 2, 3)}, weights)


@pytest.mark.parametrize(
    ("changes", "tolerance", "first"),
    [
        ({}, 0.0, None),
        ({(2, "b"): 0.25, (3, "a"): 2.0}, 0.0, (2, "b", 0.25)),
        ({(2, "loss"): 0.5, (2, "a"): 0.5}, 0.0, (2, "loss", 0.5)),
        ({(1, "a"): 2.0**-23}, 0.0, (1, "a", 2.0**-23)),
        # The tolerance is a share of how far weights have moved: by the number of the step.
        ({(3, "b"): 0.03125}, 0.011, None),
        ({(3, "b"): 0.03125}, 0.01, (3, "b", 0.03125)),
        ({(1, "b"): 0.03125}, 0.011, (1, "b", 0.03125)),
        ({(2, "loss"): 0.0625}, 0.013, None),
        ({(2, "loss"): 0.0625}, 0.012, (2, "loss", 0.0625)),
    ],
)
def test_the_first_difference_is_told_and_the_largest_of_all(
    changes: dict[tuple[int, str], float], tolerance: float, first: Any
) -> None:
    comparison = compare(made(changes), made({}), 3, tolerance, START)
    assert (comparison.equal, comparison.first) == (first is None, first)
    assert comparison.largest == max(changes.values(), default=0.0)
    assert [reference for _, reference in comparison.losses] == [10.0 / s for s in (1, 2, 3)]


def test_a_missing_tensor_is_a_difference_even_within_a_tolerance() -> None:
    whole, less = made({}), made({}, missing="a")
    for runs in ((whole, less), (less, whole)):
        assert compare(*runs, 3, 0.5, START).first == (1, "a", math.inf)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([math.nan, 1.0], [math.nan, 1.5], 0.5),
        ([math.nan], [1.0], math.inf),
        ([math.inf], [math.inf], 0.0),
        ([math.inf], [-math.inf], math.inf),
        ([True], [False], 1.0),
        ([3 + 4j], [0j], 5.0),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], math.inf),
    ],
)
def test_distance(one: list, other: list, expected: float) -> None:
    assert distance(torch.tensor(one), torch.tensor(other)) == expected


def test_losses_that_are_not_finite_agree_whatever_they_are() -> None:
    """A file of metrics has null for all of them."""
    one, other = made({(2, "loss"): math.inf}), made({(2, "loss"): math.nan})
    assert compare(one, other, 3, 0.0, START).equal
    assert not compare(one, made({}), 3, 0.5, START).equal


def test_first_weights_are_made_one_by_one_where_nobody_holds_them(make_spec) -> None:
    """The same ones that the ranks start from, buffers included."""
    parts = Path(__file__).with_name("job_parts.py")
    spec = make_spec(1, model={"factory": f"{parts}:Late", "materialize": "per_rank"})
    first = FirstWeights(spec)
    job = CapturedJob(spec)
    assert len(first) == len(list(first)) == len(job.model.state_dict())
    for name, tensor in first.items():
        assert not is_deferred(tensor)
        assert torch.equal(tensor, job.initial_values(f"model.{name}"))
