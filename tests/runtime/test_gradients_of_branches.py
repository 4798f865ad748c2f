"""Parameters that get a gradient in some steps only, on real ranks: as if on one rank.

An optimizer leaves a parameter without gradient alone; one of zeros would move it by momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from pipectl.cluster import assumed_cluster
from pipectl.jobs.planning import find_plan
from pipectl.plan import Plan, Replication
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.runtime import checkpoint
from pipectl.schedule import default_warm_up

pytestmark = pytest.mark.mpi
PARTS = Path(__file__).with_name("branching_parts.py")
SECTIONS: dict[str, Any] = {
    "model": {"factory": f"{PARTS}:Branching"},
    "loss": {"factory": "torch.nn:MSELoss"},
    "data": {"factory": f"{PARTS}:Samples"},
    "optimizer": {
        "factory": "torch.optim:SGD",
        "kwargs": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    },
}


def plain_weights(launch: Callable[..., Any], job: Path, directory: Path) -> dict[str, Tensor]:
    directory.mkdir()
    done = launch(0, "-m", "pipectl.runtime.plain", job, 2, directory)
    assert done.returncode == 0, done.stderr
    return load_file(directory / "step-000005.safetensors")


@pytest.mark.parametrize(
    ("stages", "replicas", "shard"),
    [(1, 1, False), (2, 1, False), (1, 2, False), (1, 2, True), (2, 2, False)],
    ids=["one rank", "two stages", "two replicas", "two replicas, one update", "both"],
)
def test_a_parameter_that_a_step_leaves_out_is_left_alone(
    stages: int,
    replicas: int,
    shard: bool,
    make_spec: Callable[..., Any],
    make_run: Callable[..., RunDirectory],
    launch: Callable[..., Any],
    work: Callable[..., Any],
    tmp_path: Path,
) -> None:
    run = make_run(make_spec(1, **SECTIONS))
    spec = make_spec(stages, **SECTIONS, pipeline={"micro_batches": 2, "stages": stages})
    cluster = assumed_cluster("here", [stages], stages, None)
    plan = find_plan(spec, with_costly_branches(Profile.load(run.profile)), cluster)
    replicated(plan, replicas, shard).save(run.plan)
    done = work(stages * replicas, run)
    assert done.returncode == 0, done.stderr
    expected = plain_weights(launch, run.job, tmp_path / "plain")
    found = checkpoint.load(run.checkpoints / "step-000005")
    allowed = 1e-6 if replicas > 1 else 0.0
    for name, weight in found.items():
        assert float((weight - expected[name]).abs().max()) <= allowed, name


def with_costly_branches(profile: Profile) -> Profile:
    """As if nothing else took time: two stages have a branch each."""
    operators = tuple(
        replace(each, forward_s=took_s, backward_s=took_s, timings={}, cached={})
        for each in profile.operators
        for took_s in [0.1 if each.id.startswith("model_") else 1e-6]
    )
    return replace(profile, operators=operators)


def replicated(plan: Plan, replicas: int, shard: bool) -> Plan:
    """With a branch in every stage, and every stage on several ranks."""
    for stage in plan.stages:
        assert any(node.startswith("model_") for node in stage.nodes)
    count = len(plan.stages)
    held = tuple(
        replace(stage, ranks=tuple(range(replicas * index, replicas * (index + 1))))
        for index, stage in enumerate(plan.stages)
    )
    warm_up = default_warm_up("1f1b", count, 2, ranks=count, replicas=[replicas] * count)
    return replace(
        plan,
        stages=held,
        schedule="1f1b",
        warm_up=warm_up,
        node_of_rank=(0,) * (count * replicas),
        replication=Replication.WHOLE,
        shard_optimizer=shard,
    )
