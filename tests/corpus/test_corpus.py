"""Real models, cut anywhere, train to the bits of one stage, and one stage to those of the user.

The default run has the own modules and a few models of each library; ``-m corpus`` the others.
"""

from __future__ import annotations

from typing import Any

import catalogue
import pytest
from trial import Trial

from pipectl.capture import CapturedJob

ENTRIES = {entry.name: entry for entry in catalogue.entries()}
SEED = 4  # of a cut into 6 stages
ROUNDING = 1e-5


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if entry.quick else [pytest.mark.corpus])
        for name, entry in ENTRIES.items()
    ],
)
def trial(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Trial:
    """A model trained in one stage; one model at a time is in memory."""
    entry, path = ENTRIES[request.param], tmp_path_factory.mktemp("corpus") / "job.yaml"
    if entry.missing:
        pytest.skip(f"{entry.package} is not installed")
    return Trial(CapturedJob(catalogue.spec_of(entry, path)))


@pytest.mark.timeout(900)
def test_a_cut_changes_no_bit(trial: Trial) -> None:
    assert trial.differences(trial.cut(SEED)) == []


def test_one_stage_equals_the_users_loop(trial: Trial) -> None:
    """To the bit, but for parameters with several uses, whose gradients are summed otherwise."""
    if trial.draws:
        pytest.skip("draws random numbers, which a plain loop draws in another way")
    allowed = ROUNDING if trial.shares else 0.0
    assert {n: d for n, d in trial.plain_differences().items() if d > allowed} == {}


def test_evaluation_equals_the_users_model(trial: Trial) -> None:
    """Within rounding: in evaluation torch has faster kernels of its own for attention."""
    assert {n: d for n, d in trial.evaluation_differences().items() if d > ROUNDING} == {}


def test_figures_are_finite_and_weights_move(trial: Trial) -> None:
    """What is equal would also be equal if nothing were trained."""
    assert all(tensor.isfinite().all() for tensor in trial.reference.values())
    moved = [n for n, t in trial.job.states.items() if trial.moved(n, t)]
    assert len(moved) >= len(trial.graph.states) // 2
