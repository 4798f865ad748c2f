"""A job with replicas as its worker processes run it, from the keys of its spec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.cluster import assumed_cluster
from pipectl.jobs.planning import find_plan
from pipectl.plan import Plan, Replication
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory, read_heartbeat, read_metrics
from pipectl.runtime import checkpoint

PARTS = Path(__file__).with_name("job_parts.py")
LOSS = {"factory": f"{PARTS}:loss", "weight": f"{PARTS}:valid"}


@pytest.mark.mpi
def test_two_copies_that_share_out_their_optimizer_train_what_one_rank_trains(
    make_spec: Callable[..., Any],
    make_run: Callable[..., RunDirectory],
    work: Callable[..., Any],
    tmp_path: Path,
) -> None:
    one = make_run(make_spec(1, loss=LOSS))
    pipeline = {"micro_batches": 2, "stages": 1, "replicas": 2, "shard_optimizer": True}
    spec = make_spec(2, loss=LOSS, pipeline=pipeline)
    two = RunDirectory.create(tmp_path / "replicated", spec.name, 0.0)
    two.job.write_text(one.job.read_text())
    profile = Profile.load(one.profile)
    profile.save(two.profile)
    find_plan(spec, profile, assumed_cluster("here", [2], 2, None)).save(two.plan)
    plan = Plan.load(two.plan)
    assert ([stage.replicas for stage in plan.stages], plan.shard_optimizer) == ([2], True)
    for ranks, run in ((1, one), (2, two)):
        done = work(ranks, run)
        assert done.returncode == 0, done.stderr
    expected, found = (checkpoint.load(run.checkpoints / "step-000005") for run in (one, two))
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    losses = [[line["loss"] for line in read_metrics(run)] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    heartbeat = read_heartbeat(two)
    assert [rank["stages"] for rank in heartbeat["ranks"]] == [[0], [0]]


@pytest.mark.mpi
def test_a_collate_fn_draws_for_a_split_micro_batch_what_it_draws_on_one_rank(
    make_spec: Callable[..., Any], make_run: Callable[..., RunDirectory], work: Callable[..., Any]
) -> None:
    data = {"factory": f"{PARTS}:Shifted"}
    one, two = (make_run(make_spec(ranks, loss=LOSS, data=data)) for ranks in (1, 2))
    request = PlanRequest(
        "job", 4, micro_batches=2, stages=1, replicas=2, replication=Replication.SPLIT
    )
    cluster = assumed_cluster("here", [2], 2, None)
    make_plan(Profile.load(two.profile), cluster, request).save(two.plan)
    for ranks, run in ((1, one), (2, two)):
        done = work(ranks, run)
        assert done.returncode == 0, done.stderr
    losses = [[line["loss"] for line in read_metrics(run)] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
