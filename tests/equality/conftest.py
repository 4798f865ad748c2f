"""The trainings that all tests of this folder look at."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every cell, trained on 1, 2, 3 and 4 ranks, some on 8, and all on one without dropout."""
    directory = tmp_path_factory.mktemp("equality")
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert mpiexec, "no mpiexec: pip install mpich"
    program = [sys.executable, "-m", "mpi4py", str(HERE / "cells.py"), str(directory)]
    for ranks in ("4", "8"):
        done = subprocess.run(
            [mpiexec, "-n", ranks, *program],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    return directory
