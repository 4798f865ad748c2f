from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

MODEL = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def data():
    return TensorDataset(torch.randn(16, 4), torch.randn(16, 2))

def raises():
    raise RuntimeError("no weights here")

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else self.inner(-x)

def vector_loss(outputs, targets):
    return ((outputs - targets) ** 2).mean(dim=1)
"""
PROFILE = Path("runs/tiny.profile.json")


@pytest.fixture
def real_job(job: Path) -> Path:
    """The job with a model that trains."""
    Path("model.py").write_text(MODEL)
    return job


def test_profile_says_what_was_measured_and_where_it_is(cli: Command, real_job: Path) -> None:
    result = cli("profile", "job.yaml")
    assert (result.code, result.err) == (0, "")
    first, second = result.out.splitlines()
    assert first.startswith("tiny: ")
    assert "232 B of parameters; forward " in first
    assert first.endswith(" for 2 samples")
    assert second == f"profile: {PROFILE}"
    assert json.loads(PROFILE.read_text())["micro_batch_size"] == 2
    assert cli("plan", "job.yaml").err == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.factory=./nope.py:build", "nope.py"),
        ("model.factory=./model.py:nope", "nope"),
        ("model.factory=./model.py:raises", "no weights here"),
        ("model.factory=./model.py:Branches", "model.py:"),
        ("loss.factory=./model.py:vector_loss", "scalar"),
        ("data.factory=no.such.module:data", "no.such.module"),
    ],
)
def test_code_that_cannot_be_captured_is_named_and_nothing_replaced(
    cli: Command, real_job: Path, change: str, message: str
) -> None:
    PROFILE.parent.mkdir()
    PROFILE.write_text("earlier")
    result = cli("profile", "job.yaml", "--set", change)
    assert (result.code, result.out) == (3, "")
    (error,) = (line for line in result.err.splitlines() if line.startswith("error: "))
    assert message in error
    assert PROFILE.read_text() == "earlier"


def test_a_place_that_cannot_be_written_is_told_before_measuring(
    cli: Command, real_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipectl.profiler.profile_job", pytest.fail)
    result = cli("profile", "job.yaml", "-o", "job.yaml/p.json")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: job.yaml: cannot be created: File exists\n")
