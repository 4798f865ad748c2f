"""A model whose parameters, gradients and optimizer state are three times what a rank may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipectl.runs import read_heartbeat, read_metrics
from pipectl.runtime import checkpoint

TOWER = Path(__file__).with_name("tower.py")
SECTIONS: dict[str, Any] = {
    "model": {"factory": f"{TOWER}:tower", "materialize": "per_rank"},
    "loss": {"factory": "torch.nn:CrossEntropyLoss"},
    "optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 1e-4}},
    "training": {"steps": 2, "batch_size": 4, "seed": 5},
}


SAVED = {"checkpoint": {"every": 1, "keep": 1}}
"""With copies of all they save, ranks would exceed the limit (1007 of 907 MiB)."""


@pytest.mark.mpi
def test_a_model_three_times_larger_than_a_rank(make_spec, make_run, work, profile_of) -> None:
    data = {"factory": f"{TOWER}:Vectors"}
    profile = profile_of(make_spec(4, data=data, **SECTIONS, **SAVED))
    baseline = profile.process_baseline_bytes
    assert baseline is not None
    parameter_bytes = sum(
        size for _, size in {pair for o in profile.operators for pair in o.parameters}
    )
    state_bytes = 4 * parameter_bytes  # with gradients and the two averages of Adam
    assert state_bytes > 1.2 * 2**30
    limit = baseline + state_bytes // 3

    pipeline = {"micro_batches": 2, "stages": 4, "memory_limit": limit}
    run = make_run(4, data=data, **SECTIONS, **SAVED, pipeline=pipeline)
    done = work(4, run, fresh=True)  # a fork has the memory of what it is forked from
    assert done.returncode == 0, done.stderr

    beat = read_heartbeat(run)
    peaks = [rank.peak_bytes for rank in beat.ranks]
    assert len(peaks) == 4
    assert max(peaks) <= limit, [peak >> 20 for peak in peaks]
    weights = checkpoint.load(run.checkpoints / "step-000002")
    assert 4 * sum(tensor.nbytes for tensor in weights.values()) >= state_bytes
    assert [line.step for line in read_metrics(run)] == [1, 2]
