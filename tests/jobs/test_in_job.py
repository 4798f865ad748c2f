"""The program that measures and plans in the allocation of a job."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.errors import CaptureError
from pipectl.jobs import in_job
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import Heartbeat, Record, RunDirectory
from pipectl.spec import dump, load

MORE = "pipeline: {stages: 2, micro_batches: 4, memory_limit: 1GiB}", "resources: {nodes: 2}"
SUBMITTED = 1.7e9


@pytest.fixture
def run(tmp_path, write_job):
    """A run directory as a submission without a profile leaves it."""
    run = RunDirectory.create(tmp_path, "tiny", SUBMITTED)
    run.job.write_text(dump(load(write_job(*MORE))))
    assumed_cluster("test", [1, 1], 1, None).save(run.cluster)
    Record("tiny", "slurm", "t", SUBMITTED, ranks=2, nodes=2, steps=4).save(run.record)
    return run


@pytest.fixture
def measured(monkeypatch, profile):
    """Replaces the profiler; the list says what was measured."""
    calls = []

    def measure(spec, path, progress):
        assert Path(spec.output.directory) == path.parents[1]
        calls.append(path)
        progress(1, 3, "op0")
        replace(profile, source=f"measurement {len(calls)}").save(path)
        return Profile.load(path)

    monkeypatch.setattr("pipectl.jobs.profiles.measure", measure)
    return calls


@pytest.mark.parametrize(
    ("other_model", "checkpoint", "measurements"), [(0, 0, 1), (1, 0, 2), (1, 1, 1)]
)
def test_a_profile_and_a_plan_are_made_unless_what_is_there_is_of_this_model_or_weights_are_saved(
    run, profile, measured, monkeypatch, other_model, checkpoint, measurements
):
    """Heartbeats tell how far it is."""
    beats = []
    monkeypatch.setenv("PIPECTL_ATTEMPT", "3")
    monkeypatch.setattr(Heartbeat, "save", lambda beat, path: beats.append((path, beat)))
    assert in_job.main([str(run.path)]) == 0
    assert [path for path, _ in beats] == [run.heartbeat] * 2
    assert [beat.state for _, beat in beats] == ["profiling 33%", "planning"]
    assert [(beat.step, beat.steps, beat.attempt) for _, beat in beats] == [(0, 4, 3)] * 2
    assert json.loads((run.trace / "predicted.json").read_text())["ranks"] == 2
    plan = replace(Plan.load(run.plan), assumptions=("mine",))
    assert len(plan.stages) == 2
    plan.save(run.plan)
    if other_model:
        replace(profile, key="of another model").save(run.profile)
    if checkpoint:
        (run.checkpoints / "step-000002").mkdir()
    in_job.profile_and_plan(run)
    assert measured == [run.profile] * measurements
    assert (Plan.load(run.plan) == plan) == (measurements == 1)


def test_a_failure_is_reported_in_the_run_and_on_standard_error(run, measured, monkeypatch, capsys):
    run.job.write_text(run.job.read_text().replace(": 1073741824\n", ": 1048576\n"))
    assert in_job.main([str(run.path)]) == 4, "no plan fits"
    assert (run.profile.exists(), run.plan.exists()) == (True, False)
    run.profile.unlink()
    capsys.readouterr()

    def fail(*_arguments, **_more):
        raise CaptureError("m: no such module", cure="install it")

    monkeypatch.setattr("pipectl.jobs.profiles.measure", fail)
    assert in_job.main([str(run.path)]) == 3
    assert capsys.readouterr().err == "error: m: no such module\n  install it\n"
    report = json.loads((run.errors / "prepare.json").read_text())
    said = [report[key] for key in ("type", "message", "cure", "exit_code")]
    assert said == ["CaptureError", "m: no such module", "install it", 3]


@pytest.mark.parametrize(
    ("there", "replaced"), [(None, True), (-5, True), (5, False), ("a directory", False)]
)
def test_the_profile_is_put_where_later_commands_look_if_that_can_be_and_none_is_newer(
    run, measured, there, replaced
):
    place = run.path.parent / "tiny.profile.json"
    if there == "a directory":
        place.mkdir()
    elif there is not None:
        place.write_text("another")
        os.utime(place, (SUBMITTED + there, SUBMITTED + there))
    in_job.profile_and_plan(run)
    assert run.plan.exists()
    assert (place.is_file() and place.read_text() == run.profile.read_text()) == replaced
    if replaced:
        place.write_text("of the job as it is now")
        os.utime(place, (SUBMITTED - 5, SUBMITTED - 5))
        in_job.profile_and_plan(run)
        assert place.read_text() == "of the job as it is now", "the run had its profile already"
