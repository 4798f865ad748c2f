"""Plans for a range of nodes: at submission, and at each start."""

from dataclasses import replace

import pytest

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError
from pipectl.jobs import node_range
from pipectl.jobs.output import plan_path, profile_path
from pipectl.jobs.planning import gather_job, plan_job
from pipectl.jobs.prepare import prepare
from pipectl.plan import Plan
from pipectl.planner import make_plan
from pipectl.runs import RunDirectory, read_nodes
from pipectl.spec import load, profile_key
from pipectl.units import NodeRange

RANGE = "resources: {nodes: 2-4, tasks_per_node: 2}"


@pytest.fixture
def prepared(write_job, profile, monkeypatch, tmp_path):
    """``prepared("pipeline.stages=2")``: the job for Slurm; there is a fresh profile."""
    monkeypatch.chdir(tmp_path)

    def make(*overrides):
        spec = load(write_job(RANGE), overrides, check_files=False)
        fresh = replace(profile, key=profile_key(spec))
        profile_path(spec).parent.mkdir(exist_ok=True)
        fresh.save(profile_path(spec))
        (job,) = prepare(spec, "slurm", must_run=False)
        return job

    return make


@pytest.fixture
def run(prepared, tmp_path):
    """A run of the job, before its first start."""
    job = prepared()
    run = RunDirectory(tmp_path / "runs/20261125-120000-tiny")
    run.trace.mkdir(parents=True)
    run.start.path.mkdir(parents=True)
    job.profile.save(run.profile)
    job.plan.save(run.plan)
    node_range.write_plans(run, job.plans, job.cluster)
    return run


def test_every_number_has_a_plan_with_the_same_micro_batches(prepared, monkeypatch):
    job = prepared()
    assert {count: plan.ranks for count, plan in job.plans.items()} == {2: 4, 3: 6, 4: 8}
    assert job.plan == job.plans[4]
    assert len({plan.micro_batches for plan in job.plans.values()}) == 1
    assert Plan.load(plan_path(job.spec, 3)) == job.plans[3]
    monkeypatch.setattr(node_range, "plan_job", None)
    assert prepared().plans == job.plans, "they are up to date"


def test_a_start_has_the_plan_for_the_nodes_that_it_found(run, prepared, monkeypatch):
    """The present one, which may be another than that of the range, as long as it fits."""
    spec = prepared().spec
    run.start_of(2).path.mkdir()
    monkeypatch.setenv("PIPECTL_START", str(run.start.path))
    present = replace(Plan.load(run.plan), name="rebalanced")
    present.save(run.plan)
    step = run.trace / "step-000010.json"
    for found, used, name in ((4, 4, "rebalanced"), (9, 4, "rebalanced"), (3, 3, spec.name)):
        step.touch()
        run.start.nodes.write_text(f"{found}\n")
        node_range.adopt_plan(run, spec)
        plan = Plan.load(run.plan)
        assert (read_nodes(run.start), plan.ranks, plan.name) == (used, 2 * used, name)
        assert step.exists() == (used == 4), "what was recorded under an earlier plan is elsewhere"
    assert Plan.load(run.trace_before(1) / "plan.json") == present
    assert Cluster.load(run.cluster).ranks == 6
    node_range.plan_file(run, 2).unlink()
    run.start.nodes.write_text("2\n")
    node_range.adopt_plan(run, spec)
    made = Plan.load(run.plan)
    assert (made.ranks, made.micro_batches) == (4, present.micro_batches)


def test_only_what_a_start_has_used_is_put_aside(run, prepared, monkeypatch):
    """Not a plan under which no start has begun. What was recorded is, though its plan is lost."""
    spec = prepared().spec
    monkeypatch.setenv("PIPECTL_START", str(run.start.path))
    run.start.nodes.write_text("3\n")
    node_range.adopt_plan(run, spec)  # the plan was for four nodes
    run.plan.unlink()
    node_range.adopt_plan(run, spec)
    assert not [*run.trace.glob("attempt-*")]
    (run.trace / "step-000010.json").touch()
    run.start_of(2).path.mkdir()
    monkeypatch.setenv("PIPECTL_START", str(run.start_of(2).path))
    run.start.nodes.write_text("2\n")
    run.plan.unlink()
    node_range.adopt_plan(run, spec)
    aside = {path.name for path in run.trace_before(1).iterdir()}
    assert "step-000010.json" in aside
    assert "plan.json" not in aside
    assert not (run.trace / "step-000010.json").exists()


def test_where_no_plan_fits_a_start_uses_fewer_nodes(run, prepared, monkeypatch):
    spec, make = prepared().spec, plan_job

    def refuse(own, *rest, **more):
        if own.resources.nodes == 3:
            raise InfeasibleError("three")
        return make(own, *rest, **more)

    monkeypatch.setattr(node_range, "plan_job", refuse)
    assert [*prepared("training.batch_size=32").plans] == [2, 4]
    node_range.plan_file(run, 3).unlink()
    run.start.nodes.write_text("3\n")
    node_range.adopt_plan(run, spec)
    assert (read_nodes(run.start), Plan.load(run.plan).ranks) == (2, 4)


@pytest.mark.parametrize("fitting", [8, None])
def test_what_does_not_fit_on_the_fewest_nodes_is_refused(prepared, monkeypatch, fitting):
    """Unless smaller micro-batches fit there: then all plans have these."""
    make = plan_job

    def plan(own, profile, cluster, progress, kept, planner):
        if own.resources.nodes == 2 and (fitting is None or kept == 4):
            raise InfeasibleError("too little memory", hint="take more")
        kept = kept or (fitting if own.resources.nodes == 2 else 4)
        return make(own, profile, cluster, progress, kept, planner)

    monkeypatch.setattr(node_range, "plan_job", plan)
    if fitting:
        assert {each.micro_batches for each in prepared().plans.values()} == {fitting}
        return
    with pytest.raises(InfeasibleError) as caught:
        prepared()
    assert caught.value.message == "resources.nodes: 2-4: on 2 nodes: too little memory"
    assert caught.value.hint == "raise the lowest number of nodes, or: take more"


def test_the_number_of_micro_batches_of_all_plans_is_not_the_user_s(prepared, monkeypatch):
    """Nor that of the previous plan, if that does not fit on the fewest nodes."""
    job = prepared()
    before = job.plan.micro_batches
    for fitting in (before, before // 2):

        def plan(profile, cluster, request, fitting=fitting):
            if cluster.ranks == 4 and request.micro_batches not in (None, fitting):
                raise InfeasibleError("too little memory", hint="take more")
            fits = fitting if cluster.ranks == 4 else request.micro_batches
            return make_plan(profile, cluster, replace(request, micro_batches=fits))

        inputs = gather_job(job.spec, "slurm")
        assert inputs.request.keeps_micro_batches
        plans, inputs = node_range.plan_every_count(inputs, plan)
        assert {each.micro_batches for each in plans.values()} == {fitting}
        found = inputs.request.micro_batches, inputs.request.keeps_micro_batches
        assert found == (fitting, fitting == before)
        assert not inputs.sets_micro_batches


def test_of_a_long_range_both_ends_and_some_between_are_planned():
    planned = NodeRange(3, 200).spread(node_range.MAX_PLANS)
    assert (planned[0], planned[-1], len({*planned})) == (3, 200, node_range.MAX_PLANS)
