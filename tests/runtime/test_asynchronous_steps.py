"""Trainings whose steps overlap: what they refuse before the first step, and their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipectl.runs import read_errors, read_metrics

PARTS = Path(__file__).with_name("job_parts.py")


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


@pytest.mark.mpi
def test_a_checkpoint_becomes_valid_while_the_next_steps_overlap(
    make_spec: Any, make_run: Any, work: Any
) -> None:
    """Not at the next one, before which a job that is killed would have lost both."""
    spec = make_spec(
        2,
        training={"steps": 12, "batch_size": 4},
        pipeline={"stages": 2, "schedule": "pipedream-2bw", "micro_batches": 2},
        checkpoint={"every": 6},
        callbacks={"watching": f"{PARTS}:watching"},
    )
    run = make_run(spec)
    done = work(2, run)
    assert done.returncode == 0, done.stderr
    seen = dict(map(json.loads, (run.path / "seen.jsonl").read_text().splitlines()))
    assert seen[6] == []
    assert seen[11] == ["step-000006"]
