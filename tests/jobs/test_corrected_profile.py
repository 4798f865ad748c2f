"""A profile corrected by what a run's recorded steps took."""

import dataclasses

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.errors import UsageError
from pipectl.jobs.corrections import correct_profile
from pipectl.jobs.planning import gather
from pipectl.planner import PlanRequest, make_plan
from pipectl.runs import RunDirectory
from pipectl.simulate import simulate

SLOWER = {("forward", 0): 1.5, ("backward", 0): 1.25, ("forward", 1): 0.8, ("backward", 1): 1.0}
STEP = '{"attempt": 1, "step": 10, "steps": 20, "time": 1.0, "step_time_s": 2.0}\n'


def slower(event):
    factor = SLOWER.get((event.kind, event.stage), 1.0)
    return event._replace(end_s=event.start_s + (event.end_s - event.start_s) * factor)


def test_what_is_planned_from_a_run_takes_as_long_as_its_stages_took(
    tmp_path, profile, write_job, monkeypatch
):
    """Of two ranks, of which step 10 was recorded."""
    run = RunDirectory(tmp_path / "runs/20261125-120000-tiny")
    run.trace.mkdir(parents=True)
    cluster = assumed_cluster("c", [2], 2, None)
    plan = make_plan(profile, cluster, PlanRequest("tiny", 16, micro_batches=8, stages=2))
    timeline = simulate(plan, cluster).timeline
    profile.save(run.profile)
    plan.save(run.plan)
    timeline.save(run.predicted)
    with pytest.raises(UsageError, match="no step is recorded"):
        correct_profile(run)
    events = tuple(map(slower, timeline.events))
    dataclasses.replace(timeline, events=events, step=10).save(run.measured_of(10))
    found = correct_profile(run)
    for node, stage in plan.stage_of.items():
        before, after = profile.by_id[node], found.by_id[node]
        assert after.forward_s == pytest.approx(before.forward_s * SLOWER["forward", stage])
        assert after.backward_s == pytest.approx(before.backward_s * SLOWER["backward", stage])
        forward_s, _ = after.timings[4]
        assert forward_s == pytest.approx(0.02 * SLOWER["forward", stage])

    write_job("resources: {tasks_per_node: 2}")
    monkeypatch.chdir(tmp_path)
    assert gather(tmp_path / "job.yaml", scheduler="local", from_run=run.name).profile == found

    assert found.rows is None
    run.metrics.write_text(STEP)
    assert correct_profile(run).rows is not None, "the time of the step is known"
    assert found.source == "test; corrected by 20261125-120000-tiny"
    found.save(run.profile)
    assert correct_profile(run).source == found.source, "which names the run once"
