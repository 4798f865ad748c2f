"""An evaluation that fails at the end of a run costs no step of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipectl.runs import checkpoints, read_errors, read_metrics

HERE = Path(__file__)
PARTS = HERE.parents[1] / "job_parts.py"
FAILS = "TEST_METRIC_FAILS"


class Fragile:
    """A metric without a result while an environment variable says so."""

    def update(self, outputs: Any, targets: Any) -> None:
        pass

    def compute(self) -> float:
        if FAILS in os.environ:
            raise ValueError("only one class is present")
        return 1.0


@pytest.mark.mpi
@pytest.mark.parametrize("backward", ["together", "apart"])
def test_the_weights_of_the_last_step_are_saved_and_the_resumed_run_only_evaluates(
    make_run, work, monkeypatch, trained_alone, different, backward
):
    held_out = {"data": f"{PARTS}:Samples", "metrics": {"score": f"{HERE}:Fragile"}}
    stages = 1 if backward == "apart" else 2
    pipeline = {"micro_batches": 2, "stages": stages, "backward": backward}
    run = make_run(2, evaluation=held_out, pipeline=pipeline)
    monkeypatch.setenv(FAILS, "1")
    assert work(2, run).returncode == 1
    (error,) = read_errors(run)
    assert "evaluation.metrics.score: raised ValueError: only one class" in error.message
    assert error.action == "computing metrics"
    assert [path.name for path in checkpoints(run.checkpoints)] == ["step-000005"]
    before = read_metrics(run)
    monkeypatch.delenv(FAILS)
    monkeypatch.setenv("PIPECTL_ATTEMPT", "2")
    done = work(2, run)
    assert done.returncode == 0, done.stderr
    *steps, last = read_metrics(run)
    assert steps == before
    assert [line.step for line in steps] == [1, 2, 3, 4, 5]
    assert (last.step, last.attempt, last.evaluation["score"]) == (5, 2, 1.0)
    assert different(run, trained_alone) == []
