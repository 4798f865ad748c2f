"""The link probe as a job of a real Slurm with virtual nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
pytestmark = pytest.mark.timeout(300)


def pipectl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipectl", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )


def test_links_between_virtual_nodes_are_measured_in_a_job(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = pipectl(
        tmp_path, "profile", "job.yaml", "--links", "--effort", "fast", "--scheduler", "slurm"
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "cluster: runs/tiny.cluster.json" in done.stdout
    cluster = Cluster.load(tmp_path / "runs" / "tiny.cluster.json")
    assert [(node.name, node.ranks) for node in cluster.nodes] == [("node1", 2), ("node2", 2)]
    assert cluster.assumptions == ()
    assert cluster.within_node.timings
    assert cluster.between_nodes.timings
    assert {ranks for ranks, *_ in cluster.allreduce} == {2, 4}
    (run,) = (tmp_path / "runs").glob("*-tiny-links")
    assert json.loads((run / "record.json").read_text())["scheduler"] == "slurm"
    status = pipectl(tmp_path, "status", run.name)
    assert "COMPLETED" in status.stdout
    assert "cluster.json" in status.stdout
