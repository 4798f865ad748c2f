"""A model whose parameters, gradients and optimizer state are three times what a rank may hold."""

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
from pipectl.runs import RunDirectory, read_heartbeat, read_metrics
from pipectl.runtime import checkpoint
from pipectl.spec import JobSpec, dump

TOWER = Path(__file__).with_name("tower.py")
SECTIONS: dict[str, Any] = {
    "model": {"factory": f"{TOWER}:tower", "materialize": "per_rank"},
    "loss": {"factory": "torch.nn:CrossEntropyLoss"},
    "optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 1e-4}},
    "training": {"steps": 2, "batch_size": 4, "seed": 5},
}


SAVED = {"checkpoint": {"every": 1, "keep": 1}}
"""With copies of all they save, ranks would exceed the limit (1007 of 907 MiB)."""


def planned(spec: JobSpec, profile: Profile, limit: int, base: Path) -> RunDirectory:
    ranks = spec.resources.ranks
    request = PlanRequest(spec.name, 4, micro_batches=2, stages=ranks, memory_limit_bytes=limit)
    run = RunDirectory.create(base, f"{ranks}-ranks", 0.0)
    run.job.write_text(dump(spec))
    profile.save(run.profile)
    make_plan(profile, assumed_cluster("here", [ranks], ranks, None), request).save(run.plan)
    return run


@pytest.mark.mpi
def test_a_model_three_times_larger_than_a_rank(make_spec: Any, work: Any, tmp_path: Path) -> None:
    data = {"factory": f"{TOWER}:Vectors"}
    spec = make_spec(4, data=data, **SECTIONS, **SAVED)
    threads = torch.get_num_threads()
    profile = profile_job(spec, effort=Effort.FAST)
    torch.set_num_threads(threads)
    baseline = profile.process_baseline_bytes
    assert baseline is not None
    parameter_bytes = sum(
        size for _, size in {pair for o in profile.operators for pair in o.parameters}
    )
    state_bytes = 4 * parameter_bytes  # with gradients and the two averages of Adam
    assert state_bytes > 1.2 * 2**30
    limit = baseline + state_bytes // 3

    run = planned(spec, profile, limit, tmp_path)
    done = work(4, run, fresh=True)  # a fork has the memory of what it is forked from
    assert done.returncode == 0, done.stderr

    beat = read_heartbeat(run)
    peaks = [rank["peak_bytes"] for rank in beat["ranks"]]
    assert len(peaks) == 4
    assert max(peaks) <= limit, [peak >> 20 for peak in peaks]
    weights = checkpoint.load(run.checkpoints / "step-000002")
    assert 4 * sum(tensor.nbytes for tensor in weights.values()) >= state_bytes
    assert [line["step"] for line in read_metrics(run)] == [1, 2]


@pytest.mark.mpi
def test_weights_to_start_from_reach_every_rank(
    make_spec: Any, make_run: Any, work: Any, tmp_path: Path
) -> None:
    """A run goes on from the checkpoint of another; with a rate of 0, its weights stay as read."""
    first = make_run(make_spec(1))
    assert work(0, first).returncode == 0
    stored = first.checkpoints / "step-000005"
    model = {"factory": f"{TOWER.with_name('job_parts.py')}:Model", "weights": str(stored)}
    still = {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.0}}
    for materialize in ("eager", "per_rank"):
        spec = make_spec(2, model={**model, "materialize": materialize}, optimizer=still)
        run = make_run(replace_name(spec, materialize))
        done = work(2, run)
        assert done.returncode == 0, done.stderr
        before, after = checkpoint.load(stored), checkpoint.load(run.checkpoints / "step-000005")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def replace_name(spec: JobSpec, name: str) -> JobSpec:
    return spec.model_copy(update={"name": name})
