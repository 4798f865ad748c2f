"""Evaluations of a job: the loss over held-out data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.capture import CapturedJob
from pipectl.runs import read_metrics

PARTS = Path(__file__).with_name("job_parts.py")


def test_the_loss_of_held_out_data_counts_every_valid_target_once(
    make_spec: Any, make_run: Any, work: Any
) -> None:
    """The first of three micro-batches is padding alone, and its loss NaN."""
    held_out = {"data": f"{PARTS}:HalfPadded", "batch_size": 2}
    spec = make_spec(
        1,
        optimizer={"factory": "torch.optim:SGD", "kwargs": {"lr": 0.0}},
        training={"steps": 1, "batch_size": 4},
        evaluation=held_out,
    )
    run = make_run(spec)
    assert work(0, run).returncode == 0
    (found,) = [line["evaluation"] for line in read_metrics(run) if "evaluation" in line]
    job = CapturedJob(spec)
    parts = sys.modules[type(job.model).__module__]
    data = parts.HalfPadded()
    with torch.no_grad():
        expected = parts.loss(job.model(data.vectors), data.targets)
    assert found["loss"] == pytest.approx(float(expected), rel=1e-6)
