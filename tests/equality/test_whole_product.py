"""The whole product of schedules, uses of memory and numbers of ranks: ``make test-equality``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cell_jobs as JOBS
import cells as CELLS
import models as MODELS
import pytest
import staleness as STALENESS
import torch
import whole_product as PRODUCT
from torch import Tensor

from pipectl.runs import RunDirectory, read_metrics
from pipectl.runtime import checkpoint
from pipectl.schedule import NAMES

Trained = Callable[[int], Path]
ALL = [(cell, ranks) for ranks in PRODUCT.RANKS for cell in PRODUCT.flushed(ranks)]
STALE = [(cell, ranks) for ranks in PRODUCT.RANKS for cell in PRODUCT.unflushed(ranks)]
whole = [pytest.mark.mpi, pytest.mark.product, pytest.mark.timeout(2000)]


def weights(run: Path) -> dict[str, Tensor]:
    return checkpoint.load(sorted((run / "checkpoints").glob("step-*"))[-1])


def figures(run: Path) -> list[Any]:
    """Losses, norms of gradients and evaluations, in order of their steps."""
    keys = ("step", "loss", "gradient_norm", "evaluation")
    return [[line.get(key) for key in keys] for line in read_metrics(RunDirectory(run))]


def different(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    return [name for name in expected if not torch.equal(expected[name], actual[name])]


def test_every_schedule_is_in_it() -> None:
    planned = {CELLS.PLANNED_AS.get(c.schedule, c.schedule) for c, _ in (*ALL, *STALE)}
    assert planned == set(NAMES)
    assert {c.schedule for c, _ in ALL} >= {*CELLS.APART, CELLS.DEEPER}
    assert len(set(ALL)) == len(ALL)


def test_what_every_run_of_the_tests_trains_is_a_part_of_it() -> None:
    for ranks, sample in PRODUCT.SAMPLE.items():
        assert set(sample) <= set(PRODUCT.flushed(ranks))
    tried = {(c.schedule, c.memory) for ranks in (2, 4, 8) for c in CELLS.cells_over(ranks)}
    for schedule in PRODUCT.ONE_STAGE_A_RANK + PRODUCT.CHUNKED:
        assert (schedule, "") in tried
        assert {(schedule, "recompute"), (schedule, "disk"), (schedule, "host")} & tried


@pytest.mark.parametrize(("cell", "ranks"), [pytest.param(*row, marks=whole) for row in ALL],
                         ids=str)  # fmt: skip
def test_the_whole_product_equals_one_rank_to_the_bit(
    trained_product: Trained, cell: PRODUCT.Cell, ranks: int
) -> None:
    reference = trained_product(1) / str(PRODUCT.reference(cell))
    found = trained_product(ranks) / str(cell)
    assert different(weights(reference), weights(found)) == []
    assert figures(found) == figures(reference)


@pytest.mark.parametrize(("cell", "ranks"), [pytest.param(*row, marks=whole) for row in STALE],
                         ids=str)  # fmt: skip
def test_without_flushes_the_whole_product_is_that_of_its_staleness(
    trained_product: Trained, cell: PRODUCT.Cell, ranks: int
) -> None:
    run = trained_product(ranks) / str(cell)
    stage_of = json.loads((run / "stages.json").read_text())
    stretch = JOBS.UNFLUSHED_STRETCH
    expected, losses = STALENESS.simulate(run, cell.schedule, stage_of, ranks, stretch, MODELS)
    assert different(expected, weights(run)) == []
    assert [line["loss"] for line in read_metrics(RunDirectory(run)) if "loss" in line] == losses
