"""The trainings that all tests of this folder look at."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.equality import cells

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def trained(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    warm_python_of: Callable[..., str],
    launch: Callable[..., Any],
) -> Callable[[int, cells.Cell], Path]:
    """``trained(ranks, cell)``: a run directory, of those trained when the first is asked for."""
    directory = tmp_path_factory.mktemp("equality")
    python = warm_python_of("equality", "tests.equality.all_captured")

    @cache
    def train(ranks: int, chosen: str) -> Path:
        program = HERE / "train_cells.py"
        done = launch(ranks, program, directory, chosen, timeout=1800, python=python)
        assert done.returncode == 0, done.stderr[-4000:]
        return directory / chosen

    def start(ranks: int, cell: cells.Cell) -> Path:
        if cell in cells.sampled(ranks):
            folder = train(max(ranks, 4), "sample")
        else:
            leaves_out = "not product" in request.config.option.markexpr
            assert not leaves_out, f"{cell} over {ranks} ranks must be in the sample of cells.py"
            folder = train(ranks, "others")
        return folder / str(ranks) / str(cell)

    return start
