"""A job with backwards on ranks of their own, as its workers run it from the keys of its spec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.cluster import assumed_cluster
from pipectl.jobs.planning import find_plan
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory, read_metrics
from pipectl.runtime import checkpoint

PARTS = Path(__file__).parents[1] / "job_parts.py"
HELD_OUT = {"data": {"factory": f"{PARTS}:Samples", "kwargs": {"count": 7}}, "every": 2}
SECTIONS: dict[str, Any] = {
    "loss": {"factory": f"{PARTS}:loss", "weight": f"{PARTS}:valid"},
    "evaluation": HELD_OUT,
}
APART = {"micro_batches": 2, "stages": 2, "backward": "apart"}


@pytest.mark.mpi
def test_a_job_goes_on_apart_as_on_one_rank(
    make_spec: Callable[..., Any],
    make_run: Callable[..., RunDirectory],
    work: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Evaluations on the way, weights of the loss by targets, and a start from saved weights."""
    first = make_run(make_spec(1, **SECTIONS))
    assert work(1, first).returncode == 0
    model = {"factory": f"{PARTS}:Model", "weights": str(first.checkpoints / "step-000005")}
    one = make_run(make_spec(1, model=model, **SECTIONS))
    spec = make_spec(4, model=model, pipeline=APART, **SECTIONS)
    four = RunDirectory.create(tmp_path / "apart", spec.name, 0.0)
    four.job.write_text(one.job.read_text())
    profile = Profile.load(one.profile)
    profile.save(four.profile)
    find_plan(spec, profile, assumed_cluster("here", [4], 4, None)).save(four.plan)
    ranks = [(stage.ranks, stage.backward_ranks) for stage in Plan.load(four.plan).stages]
    assert sorted(rank for pair in ranks for held in pair for rank in held) == [0, 1, 2, 3]
    for count, run in ((1, one), (4, four)):
        done = work(count, run)
        assert done.returncode == 0, done.stderr
    expected, found = (checkpoint.load(run.checkpoints / "step-000005") for run in (one, four))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    started = checkpoint.load(first.checkpoints / "step-000005")
    assert not any(torch.equal(started[name], found[name]) for name in found)
    assert figures(four) == figures(one)
    assert sum(kind == "evaluation" for _, kind, *_ in figures(four)) == 3


def figures(run: RunDirectory) -> list[tuple[Any, ...]]:
    """What the run said of every step, its times left out."""
    found: list[tuple[Any, ...]] = []
    for line in read_metrics(run):
        if "evaluation" in line:
            found.append((line["step"], "evaluation", line["evaluation"]["loss"]))
        else:
            keys = ("loss", "learning_rate", "gradient_norm")
            found.append((line["step"], "step", *(line[key] for key in keys)))
    return sorted(found)
