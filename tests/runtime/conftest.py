"""Run directories made as the commands make them, and starting ranks over a real MPI."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipectl.cluster import assumed_cluster
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.profiler import profile_job
from pipectl.profiler.effort import Effort
from pipectl.runs import RunDirectory
from pipectl.spec import JobSpec, dump, load, profile_key

PARTS = Path(__file__).with_name("job_parts.py")
WORKER = ["-m", "pipectl.runtime.worker", "--run"]


@pytest.fixture
def make_spec(tmp_path: Path) -> Callable[..., JobSpec]:
    """``make_spec(ranks, data={...}, **sections)``: four samples a step in two micro-batches."""

    def make(ranks: int, data: dict[str, Any] | None = None, **sections: Any) -> JobSpec:
        document = {
            "version": 1,
            "name": "job",
            "site_defaults": False,
            "model": {"factory": f"{PARTS}:Model"},
            "loss": {"factory": f"{PARTS}:loss", "weight": f"{PARTS}:valid"},
            "data": {"factory": f"{PARTS}:Samples", "shuffle": False, **(data or {})},
            "optimizer": {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.1}},
            "training": {"steps": 5, "batch_size": 4, "clip_grad_norm": 1.0},
            "pipeline": {"micro_batches": 2, "stages": ranks},
            "resources": {"tasks_per_node": ranks},
            **sections,
        }
        path = tmp_path / f"job-{ranks}.yaml"
        path.write_text(yaml.safe_dump(document))
        return load(path)

    return make


@pytest.fixture(scope="session")
def profile_of() -> Callable[[JobSpec], Profile]:
    """``profile_of(spec)``: measured once, and as if for one rank, which needs no neighbours."""
    found: dict[str, Profile] = {}

    def profile(spec: JobSpec) -> Profile:
        alone = spec.resources.model_copy(update={"tasks_per_node": 1})
        spec = spec.model_copy(update={"resources": alone})
        key = profile_key(spec)
        if key not in found:
            threads = torch.get_num_threads()
            found[key] = profile_job(spec, effort=Effort.FAST)
            torch.set_num_threads(threads)
        return found[key]

    return profile


@pytest.fixture
def make_run(
    tmp_path: Path, profile_of: Callable[[JobSpec], Profile]
) -> Callable[..., RunDirectory]:
    """``make_run(spec)``: a run directory with job, profile and plan."""

    def make(spec: JobSpec) -> RunDirectory:
        profile = profile_of(spec)
        ranks = spec.resources.ranks
        request = PlanRequest(
            spec.name,
            spec.training.batch_size,
            micro_batches=spec.pipeline.micro_batches,
            stages=spec.pipeline.stages,
            schedule=spec.pipeline.schedule,
        )
        run = RunDirectory.create(tmp_path / "runs", spec.name, 0.0)
        run.job.write_text(dump(spec))
        profile.save(run.profile)
        make_plan(profile, assumed_cluster("here", [ranks], ranks, None), request).save(run.plan)
        return run

    return make


Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def work(launch: Launch) -> Launch:
    """``work(ranks, run)``: the worker on a run directory; ``fresh`` as above."""
    return lambda ranks, run, **how: launch(ranks, *WORKER, run.path, **how)
