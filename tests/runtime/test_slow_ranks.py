"""A rank that is slower than planned: all others wait for it, and are told for whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.jobs.state import get_status
from pipectl.plan import Plan
from pipectl.runs import read_metrics
from pipectl.runtime import checkpoint

pytestmark = pytest.mark.mpi
PARTS = Path(__file__).with_name("bad_parts.py")
SECTIONS = {
    "model": {"factory": f"{PARTS}:Slow", "opaque": ["pausing"], "kwargs": {"pause_s": 0.0}},
    "loss": {"factory": "torch.nn:MSELoss"},
    "data": {"factory": f"{PARTS}:Vectors"},
    "training": {"steps": 3, "batch_size": 4},
}
PAUSE = "pause_s: 0.8"
"""Long beside what a rank waits for a core of a busy machine."""


def test_training_goes_on_with_the_same_bits_and_names_the_rank(
    make_spec: Any, make_run: Any, work: Any
) -> None:
    one, three = (make_run(make_spec(ranks, **SECTIONS)) for ranks in (1, 3))
    text = three.job.read_text()
    three.job.write_text(text.replace("pause_s: 0.0", PAUSE))
    assert PAUSE in three.job.read_text()
    for ranks, run in ((0, one), (3, three)):
        done = work(ranks, run)
        assert done.returncode == 0, done.stderr
    weights = [checkpoint.load(run.checkpoints / "step-000003") for run in (one, three)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert [line["loss"] for line in read_metrics(one)] == [
        line["loss"] for line in read_metrics(three)
    ]
    (slow,) = [
        stage.ranks[0]
        for stage in Plan.load(three.plan).stages
        if any("pausing" in node for node in stage.nodes)
    ]
    found = get_status(three, 0.0)
    shares = {rank["rank"]: rank["waiting"] for rank in found.ranks}
    assert shares.keys() == {0, 1, 2}
    assert found.laggard is not None, shares
    assert found.laggard.rank == slow
    assert found.laggard.others > 0.5
