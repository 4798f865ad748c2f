"""The machines that a job is planned for: described, measured, or assumed."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from job_requests import check_table

from pipectl.cluster import assumed_cluster
from pipectl.errors import DataFileError, MismatchError
from pipectl.jobs.prepare import cluster_file_key, cluster_path, find_cluster
from pipectl.spec import load

RESOURCES = "resources: {nodes: 2, tasks_per_node: 3, cpus_per_task: 2, memory_per_node: 6GiB}"


@pytest.fixture
def spec(write_job, monkeypatch, tmp_path):
    """``runs`` is in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return load(write_job(RESOURCES))


def put(spec, per_node, key):
    """A cluster that was measured before."""
    cluster = assumed_cluster("measured", per_node, 1, None)
    cluster = replace(cluster, assumed=False, source="measured", key=key)
    cluster_path(spec).parent.mkdir(exist_ok=True)
    cluster.save(cluster_path(spec))
    return cluster


def test_what_is_assumed_of_an_allocation_and_of_this_machine(spec, write_job, monkeypatch):
    """The request to the planner has the limit of memory, which is none for accelerators."""
    cluster = find_cluster(spec, "slurm").cluster
    assert cluster.node_of_rank == (0, 0, 0, 1, 1, 1)
    assert [node.cores for node in cluster.nodes] == [3, 3]
    assert cluster.device(0).memory_bytes is None
    assert cluster.assumed
    for usable, cores in ((8, 4), (3, 1), (1, 1)):  # which all ranks share
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, count=usable: set(range(count)))
        cluster = find_cluster(spec, "local").cluster
        assert [(node.ranks, node.cores) for node in cluster.nodes] == [(6, cores)]
    spec = load(write_job("resources: {gpus_per_node: 1, memory_per_node: 6GiB}"))
    for scheduler in ("slurm", "local"):
        assert find_cluster(spec, scheduler).cluster.device(0).memory_bytes is None
    assert spec.resources.memory_per_rank() is None


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_a_measured_cluster_is_found_at_its_usual_place(spec, monkeypatch, scheduler):
    """It may have another layout than was asked for: the one that the launcher made."""
    cluster = put(spec, [2, 4], cluster_file_key(spec, scheduler))
    assert find_cluster(spec, scheduler) == (cluster, cluster_path(spec), "")
    assert find_cluster(spec, "pbs").warning
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert bool(find_cluster(spec, scheduler).warning) == (scheduler == "local")


def test_a_cluster_measured_for_other_settings_is_not_used(spec, tmp_path, snapshot):
    put(spec, [3, 3], cluster_file_key(spec, "slurm"))

    def use(setting):
        found = find_cluster(load(tmp_path / "job.yaml", [setting]), "slurm")
        assert found.cluster.assumed == (found.file is None) == bool(found.warning)
        return found.warning or "used"

    check_table(snapshot, Path(__file__).with_name("settings_of_clusters.txt"), use)


def test_a_cluster_without_a_key_is_used_where_it_fits_and_a_damaged_one_is_an_error(spec):
    put(spec, [3, 3], None)
    assert find_cluster(spec, "slurm").file is not None
    found = find_cluster(spec, "local")
    assert found.cluster.assumed
    assert "describes nodes of [3, 3] ranks, but resources: ask for [6]" in found.warning
    cluster_path(spec).write_text("{")
    with pytest.raises(DataFileError, match=r"tiny\.cluster\.json") as caught:
        find_cluster(spec, "slurm")
    assert "pipectl profile --links" in (caught.value.cure or "")


def test_a_cluster_that_the_job_names_beats_the_measured_one_and_has_to_fit(
    spec, tmp_path, write_job
):
    put(spec, [3, 3], cluster_file_key(spec, "slurm"))
    described = assumed_cluster("mine", [6], 4, None)
    described.save(tmp_path / "mine.json")
    spec = load(write_job(RESOURCES, "cluster: mine.json"))
    assert find_cluster(spec, "slurm") == (described, tmp_path / "mine.json", "")
    for ranks in (5, 100_000):
        assumed_cluster("mine", [ranks], 4, None).save(tmp_path / "mine.json")
        with pytest.raises(MismatchError, match=f"describes {ranks} ranks, resources: ask for 6"):
            find_cluster(spec, "local")
