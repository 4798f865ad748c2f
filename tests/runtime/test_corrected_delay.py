"""Updates by gradients that are one update old, corrected by those after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipectl.errors import SpecError
from pipectl.jobs.warnings import delay_warning
from pipectl.runtime.versions import Versions

MUON = Path(__file__).parents[2] / "configs" / "models" / "muon.py"
DELAYED = {
    "training": {"steps": 6, "batch_size": 4, "correct_delay": True},
    "optimizer": {"factory": f"{MUON}:Muon"},
}


def test_an_update_makes_up_for_what_the_one_before_lacked() -> None:
    weight, other = (nn.Parameter(torch.tensor([10.0])) for _ in range(2))
    versions = Versions([weight, other], kept=2, corrects=True)

    def update(change: float, *, both: bool = True) -> tuple[float, float]:
        weight.grad = torch.ones(1)
        other.grad = torch.ones(1) if both else None
        versions.before_update([])
        weight.data -= change
        if both:
            other.data -= change
        versions.after_update()
        return weight.item(), other.item()

    # The first gradients are not old. The third update lacks the second, which lacked 4 - 2.
    assert [update(change) for change in (1, 2, 4)] == [(9.0, 9.0), (7.0, 7.0), (1.0, 1.0)]
    assert update(8, both=False) == (1.0 - 8 - (8 - 4), 1.0)
    versions.restart()
    assert [update(change) for change in (1, 2)] == [(-12.0, 0.0), (-14.0, -2.0)]


@pytest.mark.mpi
def test_corrected_updates_do_not_depend_on_the_stages(
    make_run: Any, train: Any, different: Any
) -> None:
    pipeline = {"schedule": "pipedream-2bw", "micro_batches": 2}
    runs = [make_run(ranks, pipeline={**pipeline, "stages": ranks}, **DELAYED) for ranks in (1, 2)]
    training = {**DELAYED["training"], "correct_delay": False}
    plain = make_run(1, pipeline={**pipeline, "stages": 1}, **{**DELAYED, "training": training})
    train(*runs, plain)
    assert different(*runs) == []
    assert different(runs[0], plain)


def test_jobs_are_told_what_bears_old_gradients(make_spec: Any) -> None:
    delayed = {"schedule": "pipedream-2bw", "micro_batches": 2, "stages": 2}
    adam = {"optimizer": {"factory": "torch.optim:AdamW"}}
    training = {"steps": 5, "batch_size": 4}
    plain = {**adam, "pipeline": delayed, "training": training}
    assert "AdamW loses quality" in delay_warning(make_spec(2, **plain), None)  # type: ignore[arg-type]
    for other in (
        {"training": {**training, "correct_delay": True}},
        {"optimizer": {"factory": f"{MUON}:Muon"}},
        {"pipeline": {**delayed, "schedule": "1f1b"}},
    ):
        assert delay_warning(make_spec(2, **{**plain, **other}), None) == ""  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="goes only with gradients that are one update old"):
        make_spec(2, training={**training, "correct_delay": True})
