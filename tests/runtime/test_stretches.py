"""Trainings whose steps overlap: what they refuse before the first step."""

from __future__ import annotations

from typing import Any

import pytest

from pipectl.runs import read_errors, read_metrics


@pytest.mark.mpi
def test_a_short_last_batch_is_refused_before_the_first_step(
    make_spec: Any, make_run: Any, work: Any
) -> None:
    """22 samples: the sixth step has 2 of them, long behind the first checkpoint."""
    spec = make_spec(
        2,
        data={"kwargs": {"count": 22}},
        training={"steps": 8, "batch_size": 4},
        pipeline={"stages": 2, "schedule": "pipedream-2bw", "micro_batches": 2},
        checkpoint={"every": 2},
    )
    run = make_run(spec)
    assert work(2, run).returncode == 3
    assert read_errors(run)[0]["message"] == (
        "data: the last batch of an epoch fills 1 of 2 micro-batches; schedule pipedream-2bw "
        "takes as many in every step"
    )
    assert read_metrics(run) == []
    assert not list(run.checkpoints.glob("step-*"))
