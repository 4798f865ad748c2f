"""The trainings that all tests of this folder look at."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    warm_python_of: Callable[..., AbstractContextManager[str]],
) -> Path:
    """Every cell, trained on 1, 2, 3 and 4 ranks, some on 8, and all on one without dropout."""
    directory = tmp_path_factory.mktemp("equality")
    with warm_python_of(HERE / "all_captured.py") as python:
        train(4, directory, python=python)
        train(8, directory, python=python)
    return directory


@pytest.fixture(scope="session")
def trained_product(
    tmp_path_factory: pytest.TempPathFactory,
    warm_python_of: Callable[..., AbstractContextManager[str]],
) -> Iterator[Callable[[int], Path]]:
    """``trained_product(ranks)``: all of whole_product.py, trained on so many ranks."""
    directory = tmp_path_factory.mktemp("product")

    @cache
    def on(ranks: int) -> Path:
        train(ranks, directory, "product", python=python)
        return directory / str(ranks)

    with warm_python_of(HERE / "all_captured.py") as python:
        yield on


def train(ranks: int, directory: Path, *words: str, python: str) -> None:
    """Run train_cells.py on so many ranks."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert mpiexec, "no mpiexec: pip install mpich"
    program = [python, "-m", "mpi4py", str(HERE / "train_cells.py"), str(directory), *words]
    done = subprocess.run(
        [mpiexec, "-n", str(ranks), *program],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
