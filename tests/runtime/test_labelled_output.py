"""Every line of every rank with its number, also of ranks that end as none should."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from pipectl.runs import Printed, RunDirectory, late_lines
from pipectl.runtime.labelling import labelled, unlabelled

RANKS = Path(__file__).with_name("labelled_ranks.py")
MPIEXEC = Path(sys.executable).parent / "mpiexec"


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["ends", "killed", "aborts"])
def test_lines_of_ranks_are_whole_and_complete(tmp_path: Path, how: str) -> None:
    run = RunDirectory(tmp_path)
    run.logs.mkdir()
    mpiexec = str(MPIEXEC) if MPIEXEC.exists() else "mpiexec"
    with run.job_log.open("wb") as log:
        subprocess.run(
            [mpiexec, "-n", "2", sys.executable, str(RANKS), how],
            env={**os.environ, "PIPECTL_RUN_DIRECTORY": str(tmp_path), "PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=how == "ends",
        )
    expected = {"[0] piece and end": 200, "[1] piece and end": 200}
    if how == "ends":
        expected["without a label"] = 2
    if how == "killed":  # a launcher that aborts may have read the last words, and drop them
        expected["[1] last words"] = 1
    until = time.monotonic() + 30.0
    while (found := counted(run, expected)) != expected and time.monotonic() < until:
        time.sleep(0.05)  # a launcher may be gone before what it did not take has found its file
    assert found == expected


def counted(run: RunDirectory, texts: Iterable[str]) -> dict[str, int]:
    """How often there are lines; launchers print more."""
    lines = [line.text for line in (*Printed(run.job_log).all(), *late_lines(run))]
    assert not [line for line in lines if "piece" in line and line not in texts]
    return {text: lines.count(text) for text in texts}


def test_outside_of_jobs_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPECTL_RUN_DIRECTORY", raising=False)
    before = Path("/proc/self/fd/1").readlink()
    with labelled("0"):
        assert Path("/proc/self/fd/1").readlink() == before
        assert unlabelled() is None
