import os
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.cluster import Cluster, assumed_cluster
from pipectl.errors import DataFileError, MismatchError
from pipectl.jobs.prepare import cluster_file_key, cluster_path, find_cluster
from pipectl.spec import JobSpec, load

RESOURCES = "resources: {nodes: 2, tasks_per_node: 3, cpus_per_task: 2, memory_per_node: 6GiB}"


@pytest.fixture
def spec(write_job):
    return load(write_job(RESOURCES))


def test_an_allocation_has_the_nodes_asked_for(spec):
    cluster = find_cluster(spec, "slurm").cluster
    assert cluster.node_of_rank == (0, 0, 0, 1, 1, 1)
    assert [node.cores for node in cluster.nodes] == [3, 3]
    assert cluster.device(0).memory_bytes is None  # the request to the planner has the limit
    assert cluster.assumed


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_the_memory_of_nodes_does_not_limit_accelerators(write_job, scheduler):
    spec = load(write_job("resources: {gpus_per_node: 1, memory_per_node: 6GiB}"))
    assert find_cluster(spec, scheduler).cluster.device(0).memory_bytes is None
    assert spec.resources.memory_per_rank() is None


@pytest.mark.parametrize(("usable", "cores"), [(8, 4), (3, 1), (1, 1)])
def test_locally_all_ranks_share_the_usable_cores(spec, monkeypatch, usable, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(usable)))
    cluster = find_cluster(spec, "local").cluster
    assert [(node.ranks, node.cores) for node in cluster.nodes] == [(6, cores)]


@pytest.mark.parametrize("ranks", [5, 100_000])
def test_a_described_cluster_needs_as_many_ranks(tmp_path, write_job, ranks):
    assumed_cluster("mine", [ranks], 4, None).save(tmp_path / "cluster.json")
    spec = load(write_job(RESOURCES, "cluster: cluster.json"))
    with pytest.raises(MismatchError, match=f"describes {ranks} ranks, resources: ask for 6"):
        find_cluster(spec, "local")


def put(spec: JobSpec, cluster: Cluster) -> Path:
    path = cluster_path(spec)
    path.parent.mkdir(exist_ok=True)
    cluster.save(path)
    return path


def measured(per_node: list[int], key: str | None) -> Cluster:
    found = assumed_cluster("measured", per_node, 1, None)
    return replace(found, assumed=False, source="measured", key=key)


@pytest.fixture
def here(monkeypatch, tmp_path):
    """``runs`` is in an empty directory."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_a_measured_cluster_is_found_at_its_usual_place(spec, here, scheduler):
    """It may have another layout than was asked for: the one that the launcher made."""
    cluster = measured([2, 4], cluster_file_key(spec, scheduler))
    path = put(spec, cluster)
    found = find_cluster(spec, scheduler)
    assert (found.cluster, found.file, found.warning) == (cluster, path, "")


@pytest.mark.parametrize(
    ("change", "is_used"),
    [
        ("resources.cpus_per_task=1", False),
        ("resources.memory_per_node=7GiB", False),
        ("launch.args=[-bind-to,none]", False),
        ("environment.variables.UCX_TLS=tcp", False),
        ("slurm.options.constraint=fast", False),
        ("slurm.options.w=node7", False),
        ("slurm.options.nodel=node7", False),
        ("slurm.options.qos=long", True),
        ("pbs.options.l=[place=pack]", False),
        ("resources.walltime=60", True),
        ("training.steps=5", True),
        ("launch.scheduler=slurm", True),
        ("name=tiny", True),
    ],
)
def test_a_cluster_measured_for_other_settings_is_not_used(spec, here, tmp_path, change, is_used):
    put(spec, measured([3, 3], cluster_file_key(spec, "slurm")))
    found = find_cluster(load(tmp_path / "job.yaml", [change]), "slurm")
    assert found.cluster.assumed == (found.file is None) == (not is_used)
    why = "was measured for other resources, launch settings or machines; it is not used"
    assert found.warning == ("" if is_used else f"runs/tiny.cluster.json {why}")


def test_a_cluster_measured_on_this_machine_is_none_for_slurm_or_another_host(
    spec, here, monkeypatch
):
    put(spec, measured([6], cluster_file_key(spec, "local")))
    assert find_cluster(spec, "slurm").warning
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert find_cluster(spec, "local").warning


def test_a_cluster_without_a_key_is_used_where_it_fits(spec, here):
    put(spec, measured([3, 3], None))
    assert find_cluster(spec, "slurm").file is not None
    found = find_cluster(spec, "local")
    assert found.cluster.assumed
    assert "describes nodes of [3, 3] ranks, but resources: ask for [6]" in found.warning


def test_a_cluster_that_the_job_names_beats_the_measured_one(here, tmp_path, write_job):
    job = write_job(RESOURCES, "cluster: mine.json")
    described = assumed_cluster("mine", [6], 4, None)
    described.save(tmp_path / "mine.json")
    spec = load(job)
    put(spec, measured([3, 3], cluster_file_key(spec, "slurm")))
    found = find_cluster(spec, "slurm")
    assert (found.cluster, found.file) == (described, tmp_path / "mine.json")


def test_a_damaged_measured_cluster_is_an_error(spec, here):
    put(spec, measured([3, 3], None)).write_text("{")
    with pytest.raises(DataFileError, match=r"tiny\.cluster\.json") as caught:
        find_cluster(spec, "slurm")
    assert "pipectl profile --links" in (caught.value.cure or "")
