import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.errors import CaptureError
from pipectl.jobs import in_job
from pipectl.plan import Plan
from pipectl.profile import Operator, OptimizerCost, Profile
from pipectl.runs import Heartbeat, Record, RunDirectory
from pipectl.spec import dump, load

MORE = "pipeline: {stages: 2, micro_batches: 4, memory_limit: 1GiB}", "resources: {nodes: 2}"
SUBMITTED = 1.7e9
PROFILE = Profile(
    name="tiny",
    source="test",
    micro_batch_size=2,
    operators=tuple(
        Operator(f"op{index}", f"op{index}", 0.01, 0.02, 100, 100, 100) for index in range(3)
    ),
    edges=(("op0", "op1"), ("op1", "op2")),
    fingerprint="abc",
    optimizer=OptimizerCost(2.0, 1e-9),
    process_baseline_bytes=2**28,
)


@pytest.fixture
def run(tmp_path, write_job):
    """A run directory as a submission without a profile leaves it."""
    job = write_job(*MORE)
    run = RunDirectory.create(tmp_path, "tiny", 1.7e9)
    run.job.write_text(dump(load(job)))
    assumed_cluster("test", [1, 1], 1, None).save(run.cluster)
    record = Record("tiny", "slurm", "t", SUBMITTED, ranks=2, nodes=2, steps=4)
    record.save(run.record)
    return run


@pytest.fixture
def measured(monkeypatch):
    """Replaces the profiler; the list says what was measured."""
    calls: list[Path] = []

    def measure(spec, path, progress):
        assert Path(spec.output.directory) == path.parents[1]
        calls.append(path)
        progress(1, 3, "op0")
        replace(PROFILE, source=f"measurement {len(calls)}").save(path)
        return Profile.load(path)

    monkeypatch.setattr("pipectl.jobs.profiles.measure", measure)
    return calls


def test_profile_plan_and_prediction_are_made(run, measured):
    assert in_job.main([str(run.path)]) == 0
    assert measured == [run.profile]
    plan = Plan.load(run.plan)
    assert len(plan.stages) == 2
    assert json.loads((run.trace / "predicted.json").read_text())["ranks"] == 2


def test_a_heartbeat_tells_how_far_it_is(run, measured, monkeypatch):
    beats = []
    monkeypatch.setenv("PIPECTL_ATTEMPT", "3")
    monkeypatch.setattr(Heartbeat, "save", lambda beat, path: beats.append((path, beat)))
    in_job.profile_and_plan(run)
    assert [path for path, _ in beats] == [run.heartbeat] * 2
    assert [beat.state for _, beat in beats] == ["profiling 33%", "planning"]
    assert [(beat.step, beat.steps, beat.attempt) for _, beat in beats] == [(0, 4, 3)] * 2


@pytest.mark.parametrize(
    ("other_model", "checkpoint", "measurements"), [(0, 0, 1), (1, 0, 2), (1, 1, 1)]
)
def test_what_is_there_is_kept_unless_the_model_is_another_and_nothing_is_saved(
    run, measured, other_model, checkpoint, measurements
):
    in_job.profile_and_plan(run)
    replace(Plan.load(run.plan), assumptions=("mine",)).save(run.plan)
    if other_model:
        replace(PROFILE, key="of another model").save(run.profile)
    if checkpoint:
        (run.checkpoints / "step-000002").mkdir()
    in_job.profile_and_plan(run)
    assert measured == [run.profile] * measurements
    assert (Plan.load(run.plan).assumptions == ("mine",)) == (measurements == 1)


def test_a_failure_is_reported_in_the_run_and_on_standard_error(run, monkeypatch, capsys):
    def fail(*_arguments, **_more):
        raise CaptureError("m: no such module", cure="install it")

    monkeypatch.setattr("pipectl.jobs.profiles.measure", fail)
    assert in_job.main([str(run.path)]) == 3
    assert capsys.readouterr().err == "error: m: no such module\n  install it\n"
    report = json.loads((run.errors / "prepare.json").read_text())
    assert (report["type"], report["message"], report["cure"], report["exit_code"]) == (
        *("CaptureError", "m: no such module"),
        *("install it", 3),
    )


def test_no_feasible_plan_exits_4(run, measured):
    run.job.write_text(
        run.job.read_text().replace("memory_limit: 1073741824", "memory_limit: 1048576")
    )
    assert "memory_limit: 1048576\n" in run.job.read_text()
    assert in_job.main([str(run.path)]) == 4
    assert run.profile.exists()
    assert not run.plan.exists()


@pytest.mark.parametrize(("age_s", "replaced"), [(None, True), (-5, True), (5, False)])
def test_the_profile_is_put_where_later_commands_look_unless_a_newer_one_is_there(
    run, measured, age_s, replaced
):
    place = run.path.parent / "tiny.profile.json"
    if age_s is not None:
        place.write_text("another")
        os.utime(place, (SUBMITTED + age_s, SUBMITTED + age_s))
    in_job.profile_and_plan(run)
    assert (place.read_text() == run.profile.read_text()) == replaced


def test_a_profile_that_the_run_already_had_replaces_none(run, measured):
    PROFILE.save(run.profile)
    place = run.path.parent / "tiny.profile.json"
    place.write_text("of the job as it is now")
    os.utime(place, (SUBMITTED - 5, SUBMITTED - 5))
    in_job.profile_and_plan(run)
    assert measured == []
    assert place.read_text() == "of the job as it is now"


def test_a_damaged_record_stops_no_job(run, measured):
    run.record.write_text("{")
    in_job.profile_and_plan(run)
    assert run.plan.exists()
    assert not (run.path.parent / "tiny.profile.json").exists()


def test_a_place_that_cannot_be_written_stops_no_job(run, measured):
    (run.path.parent / "tiny.profile.json").mkdir()
    in_job.profile_and_plan(run)
    assert run.plan.exists()
