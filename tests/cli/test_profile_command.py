"""`pipectl profile`: here, in a job of its own, and of links (`--links`)."""

import json
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pipectl import versions
from pipectl.cli.commands.profile import links_view
from pipectl.cluster import Cluster, assumed_cluster
from pipectl.jobs.measuring import make_measuring_job
from pipectl.jobs.output import is_fresh
from pipectl.jobs.state import poll
from pipectl.jobs.submit import submit
from pipectl.link import Observed, measured_link
from pipectl.profile import Profile
from pipectl.profiler.bench import time_operators
from pipectl.profiler.journal import Journal
from pipectl.runs import RunDirectory
from pipectl.spec import load, profile_key

PROFILE, CLUSTER = Path("runs/tiny.profile.json"), Path("runs/tiny.cluster.json")


def test_the_details_of_a_fault_of_pipectl_are_kept_beside_the_profile(cli, real_job, monkeypatch):
    monkeypatch.setattr("pipectl.capture.export.drop_conditions", None)
    result = cli("profile", "job.yaml")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: this is a fault of pipectl, not of your job: TypeError: ")
    details = Path("runs/tiny.profile.fault.txt")
    assert f"\n  please report it with {details}\n" in result.err
    assert "Traceback" in details.read_text()
    assert details.stat().st_mode & 0o777 == 0o600


def test_code_that_is_edited_while_it_is_measured_is_not_taken_for_measured(
    cli, real_job, monkeypatch
):
    def edit_and_time(*arguments):
        Path("model.py").write_text(f"# edited\n{Path('model.py').read_text()}")
        return time_operators(*arguments)

    monkeypatch.setattr("pipectl.profiler.job.time_operators", edit_and_time)
    before = profile_key(load(Path("job.yaml")))
    assert cli("profile", "job.yaml", "--effort", "fast").code == 0
    measured, spec = Profile.load(PROFILE), load(Path("job.yaml"))
    assert measured.key == before != profile_key(spec)
    assert not is_fresh(spec, measured)


def test_a_torch_that_was_not_tested_gives_one_warning(cli, profile, monkeypatch):
    monkeypatch.setattr(versions, "installed_version", lambda _: "2.99.0")
    result = cli("submit", "job.yaml", "--dry-run")
    text = "warning: tested with torch 2.8 to 2.15; this is 2.99.0"
    assert (result.code, result.err.count(text)) == (0, 1)


def test_an_interrupt_says_what_is_kept_and_the_next_command_what_it_uses_of_it(
    cli, real_job, monkeypatch
):
    note, handler = Journal.note, signal.getsignal(signal.SIGTERM)

    def interrupted(count, *command):
        """What a command says that is interrupted after so many measurements."""

        def note_until(journal, key, entry):
            if count:
                note(journal, key, entry)
            if len(journal) == count:
                signal.raise_signal(signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "note", note_until)
            result = cli(*command)
        assert (result.code, result.out) == (130, "")
        assert signal.getsignal(signal.SIGTERM) is handler
        return result.err

    submits = ("submit", "job.yaml", "--scheduler", "local")
    assert interrupted(0, *submits) == "interrupted before anything was measured\n"
    assert not PROFILE.exists()
    PROFILE.write_text("earlier")
    kept = "interrupted; 2 measurements are kept: the same command continues from there\n"
    assert interrupted(2, "profile", "job.yaml") == kept
    assert PROFILE.read_text() == "earlier"
    result = cli("profile", "job.yaml")
    assert (result.code, result.err) == (0, "2 measurements are from an interrupted attempt\n")


def test_a_job_measures_in_percent_and_leaves_the_profile(
    cli, real_job, only_run, monkeypatch, warm_python
):
    monkeypatch.setattr(sys, "executable", warm_python)
    how = {"links": False, "again": False}
    submit([make_measuring_job(load(real_job), "local", PROFILE, "fast", **how)], time.time())
    run = only_run()
    *_, status = poll(RunDirectory(run))
    assert status.exit_code == 0, (run / "logs/job.log").read_text()
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


@pytest.fixture
def links(cli, job, monkeypatch, warm_python):
    """``links("--json")``: measures them for a moment, with ranks that begin sooner."""
    monkeypatch.setattr(sys, "executable", warm_python)
    monkeypatch.setattr("pipectl.jobs.measuring.LINKS_BUDGET_S", {"normal": 0.1, "fast": 0.05})
    return lambda *words: cli("profile", "job.yaml", "--links", *words)


@pytest.mark.mpi
def test_links_are_measured_shown_and_used_by_the_plan(cli, profile, links):
    result = links("--effort", "fast", "--json", "-o", "deep/mine.json")
    assert result.code == 0, result.err
    assert result.json == json.loads(Path("deep/mine.json").read_text())
    assert Path("deep/mine.svg").exists()
    assert f"plans look for it in {CLUSTER}" in result.err
    result = links()
    assert result.code == 0, result.err
    assert result.out.startswith("tiny: measured with ")
    text = " ".join(result.out.split())
    for row in ("message within a node bandwidth", "between nodes: not measured", "sum 2 ranks"):
        assert f" {row}" in text
    assert text.endswith(f" cluster: {CLUSTER} picture: runs/tiny.cluster.svg")
    cluster = Cluster.load(CLUSTER)
    assert (cluster.between_nodes.assumed, cluster.within_node.assumed) == (True, False)
    failing = links("--set", 'environment.setup=["exit 3"]')
    assert (failing.code, "FAILED" in failing.out) == (1, True)
    assert Cluster.load(CLUSTER) == cluster
    planned = cli("plan", "job.yaml")
    assert (planned.code, planned.err) == (0, "")
    assert f"cluster: {CLUSTER} ({cluster.source})" in planned.out
    assert "assumed: cluster" not in planned.out
    changed = cli("plan", "job.yaml", "--set", "resources.cpus_per_task=2")
    assert f"{CLUSTER} was measured for other nodes, ranks, " in changed.err
    assert "assumed: cluster 'this machine'" in changed.out


def test_both_links_and_all_remarks_are_shown(golden):
    fast = measured_link([(4**power, 1e-6 + 4**power / 1e9) for power in range(11)])
    slow = measured_link([(4**power, 1e-5 + 4**power / 1e8) for power in range(9)])
    cluster = replace(
        assumed_cluster("two", [2, 2], 2, None),
        source="test",
        within_node=replace(fast, duplex=False, observed=Observed(both_ways=1.9)),
        between_nodes=replace(slow, observed=Observed(1.0, 2, 1.96, ((2**20, 0.25, 1.0),))),
        allreduce=((2, 4096, 1e-4), (4, 4096, 2e-4), (2, 2**20, 3e-3)),
    )
    console = Console(width=80)
    with console.capture() as captured:
        console.print(links_view(cluster))
    golden(captured.get())
