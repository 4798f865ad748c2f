"""``pipectl profile --links``."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipectl.cluster import Cluster, assumed_cluster
from pipectl.link import Observed, measured_link

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Command

CLUSTER = Path("runs/tiny.cluster.json")


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch, warm_python: str) -> None:
    """Measure for a moment, with ranks that begin sooner."""
    monkeypatch.setattr(sys, "executable", warm_python)
    monkeypatch.setattr("pipectl.jobs.measuring.LINKS_BUDGET_S", {"normal": 0.2, "fast": 0.1})


@pytest.mark.mpi
def test_links_are_measured_shown_and_used_by_the_plan(
    cli: Command, profile: Path, brief: None
) -> None:
    result = cli("profile", "job.yaml", "--links")
    assert result.code == 0, result.err
    assert "Traceback" not in result.out
    lines = result.out.splitlines()
    assert lines[0].startswith("tiny: measured with ")
    assert any(line.split() == ["message", "within", "a", "node", "bandwidth"] for line in lines)
    assert any(line.startswith("between nodes: not measured") for line in lines)
    assert any(line.split() == ["sum", "2", "ranks"] for line in lines)
    assert lines[-2:] == [f"cluster: {CLUSTER}", "picture: runs/tiny.cluster.svg"]
    assert Path("runs/tiny.cluster.svg").exists()
    cluster = Cluster.load(CLUSTER)
    assert cluster.between_nodes.assumed
    assert not cluster.within_node.assumed
    planned = cli("plan", "job.yaml")
    assert (planned.code, planned.err) == (0, "")
    assert f"cluster: {CLUSTER} ({cluster.source})" in planned.out
    assert "assumed: cluster" not in planned.out
    changed = cli("plan", "job.yaml", "--set", "resources.cpus_per_task=2")
    assert f"{CLUSTER} was measured for other resources" in changed.err
    assert "assumed: cluster 'this machine'" in changed.out
    assert "cluster: " not in changed.out.replace("assumed: cluster", "")


@pytest.mark.mpi
def test_json_is_the_cluster_and_output_says_where_it_goes(
    cli: Command, job: Path, brief: None
) -> None:
    result = cli(
        "profile", "job.yaml", "--links", "--effort", "fast", "--json", "-o", "deep/mine.json"
    )
    assert result.code == 0, result.err
    assert json.loads(result.out) == json.loads(Path("deep/mine.json").read_text())
    assert Path("deep/mine.svg").exists()
    assert not CLUSTER.exists()
    assert "plans look for it in runs/tiny.cluster.json" in result.err
    failing = cli("profile", "job.yaml", "--links", "--set", 'environment.setup=["exit 3"]')
    assert (failing.code, "FAILED" in failing.out, CLUSTER.exists()) == (1, True, False)


def test_submit_returns_at_once_and_hands_over_the_probe(
    cli: Command, job: Path, program: Callable[[str, str], Path]
) -> None:
    program("sbatch", 'cp "${@: -1}" seen.sh; echo 77')
    program("cp", 'exec /bin/cp "$@"')
    options = ("--links", "--submit", "--scheduler", "slurm", "--effort", "thorough")
    result = cli("profile", "job.yaml", *options)
    assert result.code == 0, result.err
    assert "(slurm job 77)" in result.out
    assert "runs/tiny.cluster.json" in result.out
    script = Path("seen.sh").read_text()
    assert "--job-name=tiny-links" in script
    assert "--nodes=2" in script
    assert "-m pipectl.runtime.links.probe" in script
    assert "--budget 120.0" in script
    assert "--time=00:15:00" in script


def test_both_links_and_all_remarks_are_shown() -> None:
    from rich.console import Console

    from pipectl.cli.commands.profile import links_view

    fast = measured_link([(4**power, 1e-6 + 4**power / 1e9) for power in range(11)])
    slow = measured_link([(4**power, 1e-5 + 4**power / 1e8) for power in range(9)])
    cluster = replace(
        assumed_cluster("two", [2, 2], 2, None),
        source="test",
        within_node=replace(fast, duplex=False, observed=Observed(both_ways=1.9)),
        between_nodes=replace(slow, observed=Observed(1.0, 2, 1.96, ((2**20, 0.25, 1.0),))),
        allreduce=((2, 4096, 1e-4), (4, 4096, 2e-4), (2, 2**20, 3e-3)),
    )
    console = Console(width=60)
    with console.capture() as captured:
        console.print(links_view(cluster))
    lines = captured.get().splitlines()
    text = " ".join(captured.get().split())
    assert "both ways: 1.90 times as long as one way; taken as one direction at a time" in text
    assert "2 pairs: 1.96 times as long as one; taken as one link for all" in text
    assert "hidden by compute, 1 MiB: 25%, and 100% with polling" in text
    rows = [line.split() for line in lines]
    assert ["1", "MiB", "1.05", "ms", "953", "MiB/s"] in rows
    assert ["1", "MiB", "3.00", "ms"] in rows
