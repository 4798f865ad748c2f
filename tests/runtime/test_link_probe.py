"""The link probe over a real MPI: its structure and its sanity, no speeds."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.runs import RunDirectory
from pipectl.runtime.links.probe import RankPlace, describe_node, describe_source, ranks_by_node
from pipectl.spec import dump

# The rank's number is known before MPI starts, from the launcher's environment.
NODES = """\
#!/bin/bash
nodes=(%s)
export SLURMD_NODENAME=${nodes[${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-0}}]}
exec "$@"
"""


@pytest.fixture
def probe(make_spec, tmp_path: Path, mpiexec: str, warm_python: str) -> Callable[..., Any]:
    """``probe("aab")``: three ranks on two pretended nodes; their run directory and exit code."""
    run = RunDirectory.create(tmp_path / "runs", "probed-links", 0.0)
    resources = {"tasks_per_node": 4, "memory_per_node": "8GiB"}
    run.job.write_text(dump(make_spec(4, name="probed", resources=resources)))
    wrapper = tmp_path / "on-node"
    program = [warm_python, "-m", "mpi4py", "-m", "pipectl.runtime.links.probe"]
    files = ["--run", str(run.path), "--output", str(tmp_path / "cluster.json")]
    given = [*files, "--key", "the-key", "--budget", "0.05"]

    def start(nodes: str) -> tuple[RunDirectory, int]:
        wrapper.write_text(NODES % " ".join(nodes))
        wrapper.chmod(0o755)
        command = [mpiexec, "-n", str(len(nodes)), str(wrapper), *program, *given]
        done = subprocess.run(command, capture_output=True, timeout=280, check=False)
        return run, done.returncode

    return start


def check(link: Link) -> None:
    assert not link.assumed
    assert [size for size, _ in link.timings] == [4**power for power in range(len(link.timings))]
    assert len(link.timings) >= 2
    assert all(0 < a[1] <= b[1] for a, b in pairwise(link.timings))
    assert link.latency_s == link.timings[0][1]
    assert link.bandwidth_bytes_per_s > 0
    assert link.observed.both_ways > 0
    assert link.observed.overlap
    assert all(0 <= share <= 1 for _, *shares in link.observed.overlap for share in shares)


@pytest.mark.product
@pytest.mark.mpi
def test_two_nodes_are_measured_within_and_between(probe, tmp_path: Path) -> None:
    run, code = probe("aabb")
    assert code == 0
    cluster = Cluster.load(tmp_path / "cluster.json")
    assert cluster == Cluster.load(run.cluster)
    assert (cluster.name, cluster.key, cluster.assumed) == ("probed", "the-key", False)
    assert cluster.source.endswith(": 4 ranks on 1 host")
    assert [(node.name, node.ranks) for node in cluster.nodes] == [("a", 2), ("b", 2)]
    assert cluster.nodes[0].cores == len(os.sched_getaffinity(0))
    assert cluster.device(0).memory_bytes is None  # the job's own limit counts
    check(cluster.within_node)
    check(cluster.between_nodes)
    observed = cluster.between_nodes.observed
    assert observed.pairs == 2
    assert cluster.between_nodes.shared == (observed.at_once > 2**0.5)
    assert {ranks for ranks, *_ in cluster.allreduce} == {2, 4}
    assert all(time_s > 0 for *_, time_s in cluster.allreduce)
    rows = cluster.device(0).rows
    assert [size for size, _ in rows.send_start] == [4096, 65536, 262144, 1048576]
    assert not (run.path / "rows").exists()
    assert ElementTree.parse(tmp_path / "cluster.svg").getroot().tag.endswith("svg")
    beat = json.loads(run.start.heartbeat.read_text())
    assert (beat["state"], beat["steps"]) == ("measuring sums over 4 ranks", 100)


@pytest.mark.product
@pytest.mark.mpi
def test_one_rank_a_node_leaves_the_link_within_assumed(probe, tmp_path: Path) -> None:
    assert probe("abc")[1] == 0
    cluster = Cluster.load(tmp_path / "cluster.json")
    assert cluster.within_node.assumed
    check(cluster.between_nodes)
    assert cluster.between_nodes.observed.at_once is None
    assert {ranks for ranks, *_ in cluster.allreduce} == {2, 3}
    assert cluster.device(2).rows is not None
    assert cluster.assumptions == ()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("nodes", "message", "hint"),
    [
        ("aba", "node a has the ranks [0, 2]", "block distribution"),
        ("a", "MPI started a single process", "launch.mpi"),
    ],
)
def test_scattered_ranks_and_single_processes_are_refused(probe, tmp_path, nodes, message, hint):
    run, code = probe(nodes)
    assert code == 3
    error = json.loads(next(run.start.errors.glob("rank-*.json")).read_text())
    assert error["message"].startswith(message)
    assert hint in error["hint"]
    assert error["exit_code"] == 3
    assert not (tmp_path / "cluster.json").exists()


def test_nodes_have_the_cores_of_their_ranks_and_their_share_of_memory() -> None:
    def place(node: str, *cores: int) -> RankPlace:
        return RankPlace(node, f"host-of-{node}", frozenset(cores), 16 * 2**30)

    places = [place(name) for name in "bbaac"]
    assert ranks_by_node(places) == [[0, 1], [2, 3], [4]]
    bound = describe_node([place("a", 0, 1), place("a", 2, 3)], 2, shares_memory=False)
    free = describe_node([place("b", 0, 1, 2, 3)] * 2, 2, shares_memory=True)
    assert (bound.name, bound.ranks, bound.cores, bound.device.memory_bytes) == ("a", 2, 2, None)
    assert (free.name, free.ranks, free.cores, free.device.memory_bytes) == ("b", 2, 2, 8 * 2**30)
    for library, words in {  # without dates
        "MPICH Version:      5.0.2\nMPICH Release date: a day": "MPICH 5.0.2",
        "Open MPI v5.0.11, package: Open MPI root@host, ident: 5.0.11": "Open MPI v5.0.11",
        "": "an unknown MPI",
    }.items():
        assert describe_source(library, places) == f"measured with {words}: 5 ranks on 3 hosts"
