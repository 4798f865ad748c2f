"""What a job asks of the planner, how sure a prediction is, and what a run teaches a profile."""

from dataclasses import replace
from pathlib import Path

import pytest
from job_requests import check_table

from pipectl.cluster import assumed_cluster
from pipectl.errors import UsageError
from pipectl.jobs.corrections import correct_profile
from pipectl.jobs.planning import gather, make_plan_request
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.explain.what_if import MAX_SLOWER, step_range, with_slower_links
from pipectl.runs import RunDirectory
from pipectl.simulate import simulate
from pipectl.spec import load

LINKS = ("within_node", "between_nodes")
SLOWER = {("forward", 0): 1.5, ("backward", 0): 1.25, ("forward", 1): 0.8, ("backward", 1): 1.0}
STEP = '{"attempt": 1, "step": 10, "steps": 20, "time": 1.0, "step_time_s": 2.0}\n'


def test_what_a_job_asks_of_the_planner(write_job, profile, snapshot):
    job = write_job("resources: {nodes: 2}")

    def asked(settings):
        overrides = [setting for setting in settings if setting != "disk=measured"]
        disk = None if overrides == settings else Link(1e-4, 1e9)
        (node,) = assumed_cluster("here", [1], 1, None).nodes
        node = replace(node, device=replace(node.device, disk_link=disk))
        cluster = replace(assumed_cluster("here", [1], 1, None), nodes=(node,))
        request = make_plan_request(load(job, overrides, check_files=False), profile, cluster)
        return {**vars(request), "memory_key": request.memory_key}

    plain = asked([])

    def changes(given):
        values = asked(given.split()).items()
        own = (f"{key}={value}" for key, value in values if plain[key] != value)
        return " ".join(each for each in own if not each.startswith("key="))

    check_table(snapshot, Path(__file__).with_name("planner_requests.txt"), changes)


def test_assumed_links_make_a_range_and_measured_ones_a_point(pipeline):
    plan = pipeline(2, 4, node_of_rank=[0, 1], size_bytes=10**9)
    assumed = assumed_cluster("assumed", [1, 1], 1, None)
    fast_s, slow_s = step_range(plan, assumed)
    free_s = simulate(plan, with_slower_links(assumed, 0.0)).step_time_s
    assert fast_s == pytest.approx(free_s)
    assert slow_s == simulate(plan, with_slower_links(assumed, MAX_SLOWER[1])).step_time_s
    links = {name: replace(getattr(assumed, name), assumed=False) for name in LINKS}
    assert step_range(plan, replace(assumed, assumed=False, **links)) is None
    narrow = pipeline(2, 4, node_of_rank=[0, 1], size_bytes=1000)
    assert step_range(narrow, assumed) is None


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
    replace(timeline, events=events, step=10).save(run.measured_of(10))
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
