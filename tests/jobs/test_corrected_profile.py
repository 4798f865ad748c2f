"""A profile corrected by what a run's recorded steps took."""

import dataclasses
from itertools import pairwise

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.errors import UsageError
from pipectl.jobs.corrections import correct_profile
from pipectl.jobs.planning import gather
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Operator, OptimizerCost, Profile
from pipectl.runs import RunDirectory
from pipectl.simulate import simulate

JOB = """\
name: learnt
model: {factory: "m:build"}
loss: {factory: "model"}
data: {factory: "m:data"}
training: {steps: 4, batch_size: 16}
resources: {tasks_per_node: 2}
site_defaults: false
"""
SLOWER = {("forward", 0): 1.5, ("backward", 0): 1.25, ("forward", 1): 0.8, ("backward", 1): 1.0}


@pytest.fixture
def profile():
    names = [f"op{index}" for index in range(6)]
    operators = tuple(
        Operator(name, name, 0.01, 0.02, 4000, 1000, 1000, timings={4: (0.02, 0.04)})
        for name in names
    )
    edges = tuple(pairwise(names))
    return Profile("learnt", "test", 2, operators, edges, "abc", OptimizerCost(2.0, 1e-9))


@pytest.fixture
def run(tmp_path, profile):
    """A run of two ranks of which step 10 was recorded, slower by ``SLOWER``."""
    run = RunDirectory(tmp_path / "20261125-120000-learnt")
    run.trace.mkdir(parents=True)
    cluster = assumed_cluster("c", [2], 2, None)
    plan = make_plan(profile, cluster, PlanRequest("learnt", 16, micro_batches=8, stages=2))
    timeline = simulate(plan, cluster).timeline
    slower = tuple(
        event._replace(
            end_s=event.start_s
            + (event.end_s - event.start_s) * SLOWER.get((event.kind, event.stage), 1.0)
        )
        for event in timeline.events
    )
    profile.save(run.profile)
    plan.save(run.plan)
    timeline.save(run.predicted)
    dataclasses.replace(timeline, events=slower, step=10).save(run.measured_of(10))
    return run, plan


def test_operators_take_what_their_stages_took(run, profile):
    directory, plan = run
    found = correct_profile(directory)
    for node, stage in plan.stage_of.items():
        before, after = profile.by_id[node], found.by_id[node]
        assert after.forward_s == pytest.approx(before.forward_s * SLOWER["forward", stage])
        assert after.backward_s == pytest.approx(before.backward_s * SLOWER["backward", stage])
        forward_s, _ = after.timings[4]
        assert forward_s == pytest.approx(0.02 * SLOWER["forward", stage])


def test_a_corrected_profile_names_the_run_once(run, profile):
    directory, _ = run
    found = correct_profile(directory)
    assert found.source == "test; corrected by 20261125-120000-learnt"
    found.save(directory.profile)
    assert correct_profile(directory).source == "test; corrected by 20261125-120000-learnt"


def test_rows_come_from_steps_whose_time_is_known(run):
    directory, _ = run
    assert correct_profile(directory).rows is None
    directory.metrics.write_text(
        '{"attempt": 1, "step": 10, "steps": 20, "time": 1.0, "step_time_s": 2.0}\n'
    )
    assert correct_profile(directory).rows is not None


def test_without_a_recorded_step_there_is_nothing_to_learn(run):
    directory, _ = run
    directory.measured_of(10).unlink()
    with pytest.raises(UsageError, match="no step is recorded"):
        correct_profile(directory)


def test_a_plan_from_a_run_is_made_with_the_correct_profile(run, tmp_path, monkeypatch):
    directory, _ = run
    runs = tmp_path / "runs"
    runs.mkdir()
    directory.path.rename(runs / directory.path.name)
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    inputs = gather(tmp_path / "job.yaml", scheduler="local", from_run=directory.path.name)
    assert inputs.profile == correct_profile(RunDirectory(runs / directory.path.name))
