"""The link probe as a job of a real Slurm with virtual nodes."""

import pytest

from pipectl.cluster import Cluster

JOB = """\
version: 1
name: tiny
model: {factory: "torch.nn:Linear"}
loss: {factory: "model"}
data: {factory: "m:data"}
training: {steps: 4, batch_size: 8}
resources: {nodes: 2, tasks_per_node: 2}
"""
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]


def test_links_between_virtual_nodes_are_measured_in_a_job(pipectl, tmp_path, monkeypatch):
    monkeypatch.setattr("pipectl.jobs.measuring.LINKS_BUDGET_S", {"fast": 0.2})
    (tmp_path / "job.yaml").write_text(JOB)
    command = ("profile", "job.yaml", "--links", "--effort", "fast", "--scheduler", "slurm")
    assert "cluster: runs/tiny.cluster.json" in pipectl(*command)
    cluster = Cluster.load(tmp_path / "runs" / "tiny.cluster.json")
    assert [(node.name, node.ranks) for node in cluster.nodes] == [("node1", 2), ("node2", 2)]
    assert cluster.assumptions == ()
    assert cluster.within_node.timings
    assert cluster.between_nodes.timings
    assert {ranks for ranks, *_ in cluster.allreduce} == {2, 4}
    status = pipectl("status", "last", "--json")
    assert (status["state"], status["scheduler"]) == ("COMPLETED", "slurm")
    assert "cluster.json" in pipectl("status", "last")
