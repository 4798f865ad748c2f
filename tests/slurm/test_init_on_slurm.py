"""`pipectl init` where there is a Slurm: it takes the job as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipectl.cli import main
from pipectl.spec import load


def test_a_first_job_fits_the_lab(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "first"]) == 0
    spec = load(Path("first/job.yaml"), sites=())
    assert spec.slurm.partition == "debug"
    assert spec.resources.walltime <= 3600
    assert main(["check", "first/job.yaml"]) == 0
    capsys.readouterr()
    assert main(["submit", "first/job.yaml", "--test-only"]) == 0
    assert "to start at" in capsys.readouterr().out
