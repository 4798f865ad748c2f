"""`init`, and profiles and links measured in allocations of a real Slurm of virtual nodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from job_requests import wait_until

from pipectl.cluster import Cluster
from pipectl.spec import load

JOB = str(Path(__file__).parents[2] / "configs" / "gpt-stdlib.yaml")
SMALL = (
    "--set=training.steps=4",
    "--set=training.batch_size=8",
    "--set=model.kwargs.layers=2",
    "--set=model.kwargs.width=64",
    "--set=pipeline.micro_batches=4",
    "--set=evaluation=null",
    "--set=resources.nodes=2",
    "--set=resources.tasks_per_node=1",
    "--set=launch.scheduler=slurm",
)
LARGE = (*SMALL, "--set=model.kwargs.layers=6", "--set=pipeline.micro_batches=auto")
QUICKLY = ("--effort", "fast")
PROFILE = Path("runs/gpt-stdlib.profile.json")
pytestmark = pytest.mark.timeout(600)


def test_a_first_job_fits_the_lab(pipectl):
    pipectl("init", "first")
    spec = load(Path("first/job.yaml"), sites=())
    assert spec.slurm.partition == "debug"
    assert spec.resources.walltime <= 3600
    pipectl("check", "first/job.yaml")
    assert "to start at" in pipectl("submit", "first/job.yaml", "--test-only")


@pytest.mark.usefixtures("warm")
def test_links_between_virtual_nodes_are_measured_in_a_job(pipectl, monkeypatch):
    monkeypatch.setattr("pipectl.jobs.measuring.LINKS_BUDGET_S", {"fast": 0.2})
    two_a_node = (*SMALL, "--set=resources.tasks_per_node=2")
    said = pipectl("profile", JOB, *two_a_node, "--links", *QUICKLY)
    assert "cluster: runs/gpt-stdlib.cluster.json" in said
    cluster = Cluster.load(Path("runs/gpt-stdlib.cluster.json"))
    assert [(node.name, node.ranks) for node in cluster.nodes] == [("node1", 2), ("node2", 2)]
    assert cluster.assumptions == ()
    assert cluster.within_node.timings
    assert cluster.between_nodes.timings
    assert {ranks for ranks, *_ in cluster.allreduce} == {2, 4}
    status = pipectl("status", "last", "--json")
    assert (status["state"], status["scheduler"]) == ("COMPLETED", "slurm")
    assert "cluster.json" in pipectl("status", "last")


def test_a_login_node_is_refused_and_an_allocation_is_not(pipectl):
    assert "--submit" in pipectl("profile", JOB, *SMALL, code=2)
    inside = ["srun", "-n1", sys.executable, "-m", "pipectl", "profile", JOB, *SMALL, *QUICKLY]
    subprocess.run(inside, check=True, timeout=400)
    assert PROFILE.exists()


@pytest.mark.usefixtures("warm")
def test_a_submitted_profile_is_found_on_the_login_node(pipectl, tmp_path, capsys):
    found = pipectl("profile", JOB, *SMALL, *QUICKLY, "--submit", "--wait", "--json")
    assert (found["cached"], found["file"]) == (False, str(tmp_path / PROFILE))
    status = pipectl("status", "last", "--json")
    assert (status["state"], status["kind"], status["scheduler"]) == (
        *("COMPLETED", "profile"),
        "slurm",
    )
    before = PROFILE.read_text()
    pipectl("plan", JOB, *SMALL)
    assert PROFILE.read_text() == before


@pytest.mark.usefixtures("warm")
def test_a_profile_measured_by_a_training_job_is_found_too(pipectl):
    dry_run = ("submit", JOB, *SMALL, "--dry-run")
    assert "jobs.in_job" in pipectl(*dry_run)
    pipectl("submit", JOB, *SMALL, "--wait")
    (run,) = Path("runs").glob("*-gpt-stdlib")
    assert PROFILE.read_text() == (run / "profile.json").read_text()
    assert "jobs.in_job" not in pipectl(*dry_run)


@pytest.mark.usefixtures("warm")
def test_an_ended_job_goes_on_in_the_next(pipectl):
    submit = ("profile", JOB, *LARGE, *QUICKLY, "--submit", "--json")
    run = pipectl(*submit)["run"]
    kept = wait_until(_kept, 280, 0.1)
    pipectl("cancel", run)
    wait_until(lambda: pipectl("status", run, "--json")["state"] == "CANCELLED", 280, 0.2)
    assert not PROFILE.exists()
    assert pipectl(*submit, "--wait")["resumed"] >= kept
    assert PROFILE.exists()
    assert _kept() == 0


def _kept() -> int:
    """Measurements in the journal."""
    journals = [json.loads(path.read_text()) for path in Path("runs/.cache").glob("*.journal")]
    return max((len(journal["entries"].keys() - {"graph"}) for journal in journals), default=0)
