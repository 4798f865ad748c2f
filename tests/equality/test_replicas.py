"""Replicas of stages train what one rank trains: up to the order of sums, which only plans share.

Compared with one rank within rounding, under SGD; and to the bit with each other, where they add
the same parts in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cell_jobs as JOBS
import outcome
import pytest
import replica_cells as CELLS
import torch
from torch import Tensor

from pipectl.runs import RunDirectory, read_metrics

Shared = CELLS.Shared
HALF = ("gpt_bf16", "gpt_float16")
TWO = Shared("gpt", (2,))
Trained = Callable[[int, Any], Path]


def rows(chosen: Callable[[Any], bool]) -> list[Any]:
    """Cells; those that only ``make test-equality`` has are marked."""
    further = filter(chosen, CELLS.FURTHER)
    marked = (pytest.param(cell, marks=pytest.mark.product) for cell in further)
    return [*filter(chosen, CELLS.SHARED), *marked]


def adds_as_two_replicas(cell: Any) -> bool:
    """Whether it adds the parts of its gradients in the order of the cell ``TWO``."""
    like = (cell.model, cell.way, cell.batch) == (TWO.model, TWO.way, TWO.batch)
    return like and {*cell.replicas} == {2} and cell != TWO


def weights(trained: Trained, cell: Any) -> dict[str, Tensor]:
    return outcome.weights(trained(cell.ranks, cell))


def figures(trained: Trained, cell: Any) -> list[float | None]:
    """Losses, then norms of gradients, of all steps, then losses of evaluations.

    The norm of a skipped step is None. Evaluations with statistics of a norm are left out.
    """
    lines = read_metrics(RunDirectory(trained(cell.ranks, cell)))
    steps = [line for line in lines if line.is_step]
    found = [*(line.loss for line in steps), *(line.gradient_norm for line in steps)]
    if cell.model != "cnn":
        found += [line.evaluation["loss"] for line in lines if line.evaluation is not None]
    return found


def assert_close(found: list[float | None], expected: list[float | None], rel: float) -> None:
    assert [item is None for item in found] == [item is None for item in expected]
    numbers = [[item for item in items if item is not None] for items in (found, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=rel)


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest, statistics of a norm left out."""
    names = [name for name in expected if "running" not in name]
    return max(float((found[name] - expected[name]).abs().max()) for name in names)


@pytest.mark.mpi
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("cell", rows(lambda _: True), ids=str)
def test_replicas_equal_one_rank_within_rounding(trained: Trained, cell: Any) -> None:
    """Steps of SGD move weights by some tenths; sums in another order, by some 1e-7."""
    found, expected = weights(trained, cell), weights(trained, cell.reference)
    assert found.keys() == expected.keys()
    allowed = 2e-4 if cell.model in HALF else 2e-6
    assert distance(found, expected) <= allowed
    rel = 1e-3 if cell.model in HALF else 2e-5
    assert_close(figures(trained, cell), figures(trained, cell.reference), rel)


@pytest.mark.mpi
@pytest.mark.parametrize("cell", rows(adds_as_two_replicas), ids=str)
def test_equal_replicas_give_the_same_bits_in_every_plan(trained: Trained, cell: Any) -> None:
    found, expected = weights(trained, cell), weights(trained, TWO)
    assert outcome.different(expected, found) == []
    assert_close(figures(trained, cell), figures(trained, TWO), 1e-12)


@pytest.mark.mpi
def test_replicas_add_in_another_order_than_one_rank(trained: Trained) -> None:
    """The table would also be equal if one replica did all the work."""
    found, expected = (weights(trained, Shared("gpt", count)) for count in ((2,), (1,)))
    assert outcome.different(expected, found)


@pytest.mark.mpi
def test_sums_begin_while_the_last_backward_of_a_step_goes_on(trained: Trained) -> None:
    """The table would also be equal if they began behind it. Before the steps is the warm-up."""
    cell = Shared("gpt", (2,))
    early = json.loads((trained(2, cell) / "early_sums.json").read_text())
    assert early[-JOBS.STEPS :] == [True] * JOBS.STEPS


@pytest.mark.mpi
@pytest.mark.parametrize("replicas", [(2,), (1, 2, 1)], ids=str)
def test_statistics_are_means_over_replicas_and_counts_are_exact(
    trained: Trained, replicas: tuple[int, ...]
) -> None:
    cell = Shared("cnn", replicas)
    found, expected = weights(trained, cell), weights(trained, cell.reference)
    counts = [name for name in expected if name.endswith("num_batches_tracked")]
    assert counts
    assert all(torch.equal(found[name], expected[name]) for name in counts)
    for name in expected:
        if "running" in name:
            assert float((found[name] - expected[name]).abs().max()) < 0.5
