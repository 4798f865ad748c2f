"""The trainings that all tests of this folder look at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cells
import pytest

HERE = Path(__file__).parent


class Trained:
    """Runs of cells, trained when the first of their set is asked for."""

    def __init__(self, directory: Path, launch: Callable[..., Any]) -> None:
        self._directory, self._launch = directory, launch
        self._done: set[tuple[str, int]] = set()
        self._sample: dict[str | int, list[cells.Cell]] = {
            **{ranks: cells.sampled(ranks) for ranks in cells.RANKS},
            "plain": cells.plain_cells(sample=True),
        }

    def __call__(self, ranks: int | str, cell: cells.Cell) -> Path:
        """Run directory of a cell on so many ranks, or ``"plain"``: on one, without dropout."""
        chosen = "sample" if cell in self._sample[ranks] else "others"
        number = 1 if isinstance(ranks, str) else ranks
        self._train(4 if chosen == "sample" and number < 4 else number, chosen)
        return self._directory / chosen / str(ranks) / str(cell)

    def _train(self, ranks: int, chosen: str) -> None:
        if (chosen, ranks) in self._done:
            return
        self._done.add((chosen, ranks))
        program = HERE / "train_cells.py"
        done = self._launch(ranks, program, self._directory, chosen, timeout=1800)
        assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="session")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    warm_python_of: Callable[..., str],
    launch: Callable[..., Any],
) -> Trained:
    """``trained(ranks, cell)``: a run directory."""
    python = warm_python_of("equality", HERE / "all_captured.py")
    return Trained(tmp_path_factory.mktemp("equality"), partial(launch, python=python))
