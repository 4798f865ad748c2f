"""Training ends when a metric of the evaluations no longer improves, and can go on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.runs import RunDirectory, checkpoints, read_heartbeat, read_metrics
from pipectl.runs.readers import sum_up
from pipectl.runtime import checkpoint
from pipectl.runtime.stopping import count_without_improvement
from pipectl.spec import dump, load

PARTS = Path(__file__).parents[1] / "job_parts.py"
STEPS = 9


@pytest.mark.parametrize(
    ("values", "mode", "min_delta", "count"),
    [
        ([], "min", 0.0, 0),
        ([3.0], "min", 0.0, 0),
        ([3.0, 2.0, 2.0], "min", 0.0, 1),
        ([3.0, 2.0, 2.5, 1.9], "min", 0.0, 0),
        ([3.0, 2.0, 2.5, 1.9], "min", 0.2, 2),
        ([0.5, 0.6, 0.6, 0.1], "max", 0.0, 2),
        ([math.nan, 2.0, math.nan, math.inf], "min", 0.0, 2),
        ([math.nan, math.nan], "max", 0.0, 2),
        ([math.inf, 2.0], "min", 0.0, 0),
    ],
)
def test_values_without_an_improvement_are_counted(
    values: list[float], mode: str, min_delta: float, count: int
) -> None:
    assert count_without_improvement(values, mode, min_delta) == count


def early(patience: int) -> dict[str, Any]:
    stopping = {"patience": patience, "min_delta": 1e9}  # so that nothing is an improvement
    data = {"factory": f"{PARTS}:Samples"}
    return {"evaluation": {"data": data, "every": 2, "early_stopping": stopping}}


@pytest.mark.mpi
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw"])
def test_a_run_ends_early_and_goes_on_to_the_bit(
    module_runs: Any, work: Any, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    training = {"steps": STEPS, "batch_size": 4}
    optimizer = {"factory": "torch.optim:AdamW", "kwargs": {"lr": 0.05}}
    more = {"checkpoint": {"every": 4}, "training": training, "optimizer": optimizer}
    sections = {**early(100), **more}
    whole = module_runs(2, sections, schedule=schedule)
    run = module_runs(2, {**sections, **early(2)}, schedule=schedule)
    for each in (whole, run):
        done = work(2, each)
        assert done.returncode == 0, done.stderr
    why = "loss has not improved by more than 1e+09 in 2 evaluations"
    assert f"the training ends after step 6: {why}" in done.stderr
    measured = sum_up(read_metrics(run))
    assert (measured.step, measured.evaluation_step) == (6, 6)
    assert measured.early_stop == why
    assert read_heartbeat(run).state == "done"
    assert names(run) == ["step-000006", "step-000004"]

    monkeypatch.setenv("PIPECTL_ATTEMPT", "2")
    done = work(2, run)  # as it is, it has nothing to do
    assert done.returncode == 0, done.stderr
    assert names(run)[0] == "step-000006"
    run.job.write_text(dump(load(run.job, ["evaluation.early_stopping.patience=100"])))
    monkeypatch.setenv("PIPECTL_ATTEMPT", "3")
    done = work(2, run)
    assert done.returncode == 0, done.stderr
    assert sum_up(read_metrics(run)).early_stop == ""
    if schedule == "1f1b":  # checkpoints drain the pipeline of the other, which is part of it
        check_weights(whole, run)


def names(run: RunDirectory) -> list[str]:
    return [path.name for path in checkpoints(run.checkpoints)]


def check_weights(*runs: RunDirectory) -> None:
    one, other = (checkpoint.load(run.checkpoints / f"step-{STEPS:06d}") for run in runs)
    assert all(torch.equal(one[name], other[name]) for name in one)
