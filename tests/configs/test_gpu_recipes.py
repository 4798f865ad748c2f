"""The recipes for GPU clusters ask for one GPU per rank, with the words of the batch system."""

from functools import partial
from pathlib import Path

import pytest

from pipectl.spec import load

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_rank_per_gpu(scheduler):
    spec = load(CONFIGS / f"gpt-{scheduler}-gpus.yaml", ["site_defaults=false"])
    assert spec.launch.scheduler == scheduler
    assert spec.resources.gpus_per_node == spec.resources.tasks_per_node > 1
    assert spec.resources.nodes > 1
    assert (spec.slurm.partition, spec.pbs.queue)[scheduler == "pbs"] == "gpu"


def test_both_train_the_same_model():
    read = partial(load, overrides=["site_defaults=false"])
    slurm, pbs = (read(CONFIGS / f"gpt-{name}-gpus.yaml") for name in ("slurm", "pbs"))
    assert slurm.model == pbs.model
    assert slurm.training == pbs.training
    assert slurm.resources == pbs.resources
