"""`pipectl profile`: here, in a job of its own (`--submit`), and of links (`--links`)."""

import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pipectl.cli.commands.profile import links_view
from pipectl.cli.submission import ago
from pipectl.cluster import Cluster, assumed_cluster
from pipectl.link import Observed, measured_link
from pipectl.profiler.journal import Journal
from pipectl.spec import load, profile_key

PROFILE, CLUSTER = Path("runs/tiny.profile.json"), Path("runs/tiny.cluster.json")
LOCAL = ("--submit", "--scheduler", "local")


def test_a_fault_of_pipectl_says_so_and_keeps_its_details_beside_the_profile(
    cli, real_job, monkeypatch
):
    monkeypatch.setattr("pipectl.capture.export.drop_conditions", None)
    result = cli("profile", "job.yaml")
    assert (result.code, result.out) == (1, "")
    error, where, versions = result.err.splitlines()
    assert error.startswith("error: this is a fault of pipectl, not of your job: TypeError: ")
    assert where == "  please report it with runs/tiny.profile.fault.txt"
    assert re.search(r"pipectl \S+, torch \S+, mpi4py \S+, Python \S+", versions)
    details = Path("runs/tiny.profile.fault.txt")
    assert "Traceback" in details.read_text()
    assert details.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "interrupted before anything was measured\n"),
        (2, "interrupted; 2 measurements are kept: the same command continues from there\n"),
    ],
)
def test_an_interrupt_says_what_is_kept_in_one_line(cli, real_job, monkeypatch, count, said):
    def profile_job(*_arguments, journal, **_more):
        for number in range(count):
            journal.note(str(number), {})
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("pipectl.profiler.profile_job", profile_job)
    PROFILE.parent.mkdir()
    PROFILE.write_text("earlier")
    handler = signal.getsignal(signal.SIGTERM)
    result = cli("profile", "job.yaml")
    assert (result.code, result.out, result.err) == (130, "", said)
    assert PROFILE.read_text() == "earlier"
    assert signal.getsignal(signal.SIGTERM) is handler
    PROFILE.unlink()
    result = cli("submit", "job.yaml", "--scheduler", "local")
    assert (result.code, result.err.startswith("interrupted")) == (130, True)


def test_what_is_left_over_is_used_and_said_to_be(cli, real_job, monkeypatch):
    note, noted = Journal.note, []

    def interrupting(journal, key, entry):
        note(journal, key, entry)
        noted.append(key)
        if len(journal) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", interrupting)
        assert cli("profile", "job.yaml").code == 130
    result = cli("profile", "job.yaml")
    assert result.code == 0
    assert result.err == "2 measurements are from an interrupted attempt\n"


@pytest.mark.parametrize(
    ("age_s", "text"),
    [
        (-3, "just now"),
        (59, "just now"),
        (60, "1 min ago"),
        (3 * 3600 + 5, "3 h ago"),
        (86400, "1 day ago"),
        (9 * 86400, "9 days ago"),
    ],
)
def test_ages(age_s, text):
    assert ago(age_s) == text


def test_a_job_measures_in_percent_and_leaves_the_profile(cli, real_job, only_run):
    result = cli("profile", "job.yaml", *LOCAL, "--wait", "--effort", "fast")
    run = only_run()
    assert result.code == 0, (run / "logs/job.log").read_text()
    first, second, *_, last = result.out.splitlines()
    assert first.startswith(f"submitted: {run.name} (local job ")
    assert second == f"see: pipectl status {run.name}"
    assert last == f"profile: {PROFILE}"
    assert json.loads(PROFILE.read_text())["key"] == profile_key(load(real_job))
    assert PROFILE.read_text() == (run / "profile.json").read_text()
    assert cli("plan", "job.yaml").err == ""
    shown = cli("status", run.name).out
    assert re.search(r"^  progress .* 100%$", shown, re.MULTILINE)
    assert f"  profile       {run}/profile.json\n" in shown
    assert "100%" in cli("status").out
    status = cli("status", "last", "--json").json
    assert (status["kind"], status["step"], status["steps"]) == ("profile", 100, 100)
    assert cli("status", "tiny").code == 6  # the name of the job means its training


def test_a_failure_has_the_exit_code_of_the_command(cli, real_job):
    broken = ("--set", "model.factory=./model.py:raises")
    result = cli("profile", "job.yaml", *LOCAL, "--wait", *broken)
    assert result.code == 3
    assert "no weights here" in result.out
    assert not PROFILE.exists()


@pytest.fixture
def brief(monkeypatch, warm_python):
    """Measure for a moment, with ranks that begin sooner."""
    monkeypatch.setattr(sys, "executable", warm_python)
    monkeypatch.setattr("pipectl.jobs.measuring.LINKS_BUDGET_S", {"normal": 0.2, "fast": 0.1})


@pytest.mark.mpi
def test_links_are_measured_shown_and_used_by_the_plan(cli, profile, brief):
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
def test_json_is_the_cluster_and_output_says_where_it_goes(cli, job, brief):
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


def test_both_links_and_all_remarks_are_shown():
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
