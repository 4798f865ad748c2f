"""Training with messages of several pieces, some of which are under way at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.runtime import checkpoint

pytestmark = pytest.mark.mpi
PARTS = Path(__file__).with_name("large_parts.py")
SECTIONS: dict[str, Any] = {
    "model": {"factory": f"{PARTS}:Wide"},
    "loss": {"factory": "torch.nn:MSELoss"},
    "training": {"steps": 3, "batch_size": 12},
}
PIPELINE = {"micro_batches": 6, "schedule": "gpipe"}


@pytest.mark.parametrize("progress", ["poll", "thread"])
def test_messages_of_several_pieces_change_no_bit(
    make_spec: Any, make_run: Any, work: Any, progress: str
) -> None:
    found = []
    for ranks in (1, 2):
        sections = {**SECTIONS, "launch": {"progress": progress}}
        data = {"factory": f"{PARTS}:WideSamples"}
        run = make_run(make_spec(ranks, data, pipeline={**PIPELINE, "stages": ranks}, **sections))
        done = work(ranks, run)
        assert done.returncode == 0, done.stderr
        found.append(checkpoint.load(run.checkpoints / "step-000003"))
    one, two = found
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
