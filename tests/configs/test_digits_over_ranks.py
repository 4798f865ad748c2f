"""The example's promise: the accuracy on held-out digits is the same on 1 and 4 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.cluster import assumed_cluster
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.profiler import profile_job
from pipectl.profiler.effort import Effort
from pipectl.runs import RunDirectory, read_metrics
from pipectl.runtime import checkpoint
from pipectl.spec import JobSpec, dump, load

JOB = Path(__file__).parents[2] / "configs" / "digits-cnn.yaml"
SHORTER = (
    "site_defaults=false",
    "training.steps=6",
    "evaluation.every=3",
    "model.kwargs={width: 8, blocks: 1}",
)


def shortened(ranks: int) -> JobSpec:
    return load(JOB, [*SHORTER, f"resources.tasks_per_node={ranks}"])


def train(spec: JobSpec, profile: Profile, base: Path, launch: Any) -> RunDirectory:
    """The job as the commands run it, over real MPI ranks with a stage each."""
    ranks = spec.resources.ranks
    run = RunDirectory.create(base, f"{ranks}-ranks", 0.0)
    run.job.write_text(dump(spec))
    profile.save(run.profile)
    batch, parts = spec.training.batch_size, spec.pipeline.micro_batches
    request = PlanRequest(spec.name, batch, micro_batches=parts, stages=ranks)
    make_plan(profile, assumed_cluster("here", [ranks], ranks, None), request).save(run.plan)
    done = launch(ranks, "-m", "pipectl.runtime.worker", "--run", run.path)
    assert done.returncode == 0, done.stderr
    return run


def evaluations(run: RunDirectory) -> list[Any]:
    return [line["evaluation"] for line in read_metrics(run) if "evaluation" in line]


@pytest.mark.mpi
def test_accuracy_and_weights_do_not_depend_on_the_ranks(tmp_path: Path, launch: Any) -> None:
    pytest.importorskip("sklearn", reason="pip install 'pipectl[examples]'")
    threads = torch.get_num_threads()
    profile = profile_job(shortened(1), effort=Effort.FAST)
    torch.set_num_threads(threads)
    one, four = (train(shortened(ranks), profile, tmp_path, launch) for ranks in (1, 4))
    expected = checkpoint.load(one.checkpoints / "step-000006")
    found = evaluations(one)
    assert len(found) == 2
    assert found[0] != found[1]
    weights = checkpoint.load(four.checkpoints / "step-000006")
    assert weights.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(expected[n], weights[n])] == []
    assert evaluations(four) == found
