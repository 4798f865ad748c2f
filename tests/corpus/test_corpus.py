"""Real models, cut anywhere, train to the bits of one stage, and one stage to those of the user.

The default run has the own modules and a few models of each library; ``-m corpus`` the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipectl.capture import CapturedJob
from tests.corpus import catalogue
from tests.corpus.trial import Trial

ENTRIES = {entry.name: entry for entry in catalogue.entries()}
SEED = 4  # of a cut into 6 stages
ROUNDING = 1e-5


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if entry.quick else [pytest.mark.corpus])
        for name, entry in ENTRIES.items()
    ],
)
def test_a_model_trains_in_any_cut_as_in_one_stage_and_as_in_a_loop_of_its_user(
    name: str, tmp_path: Path
) -> None:
    entry = ENTRIES[name]
    if entry.missing:
        pytest.skip(f"{entry.package} is not installed")
    trial = Trial(CapturedJob(catalogue.spec_of(entry, tmp_path / "job.yaml")))
    assert trial.differences(trial.cut(SEED)) == []
    if not trial.draws:  # random numbers, which a plain loop draws in another way
        # If several operators use a parameter, a loop adds its gradients in another order.
        allowed = ROUNDING if trial.shares else 0.0
        assert {n: d for n, d in trial.plain_differences().items() if d > allowed} == {}
    # In evaluation, torch has faster kernels of its own for attention.
    assert {n: d for n, d in trial.evaluation_differences().items() if d > ROUNDING} == {}
    # All this would also be equal if nothing were trained.
    assert all(tensor.isfinite().all() for tensor in trial.reference.values())
    first, last = trial.job.states, trial.reference
    moved = [name for name in first.keys() & last if not torch.equal(first[name], last[name])]
    assert len(moved) >= len(trial.graph.states) // 2
