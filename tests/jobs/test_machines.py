from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.errors import MismatchError
from pipectl.jobs.machines import cluster_of
from pipectl.jobs.places import scheduler_name
from pipectl.spec import JobSpec, load

JOB = """\
version: 1
name: tiny
model: {factory: "m:build"}
loss: {factory: "model"}
data: {factory: "m:data"}
training: {steps: 4, batch_size: 8}
resources: {nodes: 2, tasks_per_node: 3, cpus_per_task: 2, memory_per_node: 6GiB}
site_defaults: false
"""


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "job.yaml").write_text(JOB)
    return load(tmp_path / "job.yaml")


def test_an_allocation_has_the_nodes_asked_for(spec: JobSpec) -> None:
    cluster = cluster_of(spec, "slurm")
    assert cluster.node_of_rank == (0, 0, 0, 1, 1, 1)
    assert [node.cores for node in cluster.nodes] == [3, 3]
    assert cluster.device(0).memory_bytes == 2 * 2**30
    assert cluster.assumed


@pytest.mark.parametrize(("usable", "cores"), [(8, 4), (3, 1), (1, 1)])
def test_locally_all_ranks_share_the_usable_cores(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, usable: int, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(usable)))
    cluster = cluster_of(spec, "local")
    assert [(node.ranks, node.cores) for node in cluster.nodes] == [(6, cores)]


def test_a_described_cluster_is_taken_as_it_is(tmp_path: Path) -> None:
    described = assumed_cluster("mine", [6], 4, None)
    described.save(tmp_path / "cluster.json")
    (tmp_path / "job.yaml").write_text(JOB + "cluster: cluster.json\n")
    assert cluster_of(load(tmp_path / "job.yaml"), "slurm") == described


def test_a_described_cluster_needs_as_many_ranks(tmp_path: Path) -> None:
    assumed_cluster("mine", [5], 4, None).save(tmp_path / "cluster.json")
    (tmp_path / "job.yaml").write_text(JOB + "cluster: cluster.json\n")
    with pytest.raises(MismatchError, match="describes 5 ranks, resources: ask for 6"):
        cluster_of(load(tmp_path / "job.yaml"), "local")


def test_what_is_asked_for_beats_the_spec(spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert scheduler_name(spec, None) == "local"
    assert scheduler_name(spec, "slurm") == "slurm"
