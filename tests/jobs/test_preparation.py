"""What is known before a job is submitted: its machines, and what it asks of the planner."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.batch.launchers import MpiChoice
from pipectl.cli import main
from pipectl.cluster import assumed_cluster
from pipectl.errors import UsageError
from pipectl.jobs import mounts
from pipectl.jobs.corrections import correct_profile
from pipectl.jobs.environment import note_of_modules
from pipectl.jobs.job import choose_scheduler, fit_to_allocation, make_job
from pipectl.jobs.output import cluster_file_key, cluster_path, find_cluster
from pipectl.jobs.planning import gather, make_plan_request
from pipectl.jobs.prepare import prepare
from pipectl.jobs.verify import refuse_unrepeatable
from pipectl.jobs.warnings import (
    batch_warning,
    coupling_warning,
    loss_warning,
    metrics_warning,
    replicas_warning,
    script_warning,
    sharing_warning,
    splitting_warning,
    warnings_of,
)
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.explain.bottleneck import SLOWEST_ASSUMED, step_range
from pipectl.profile_parts import Readings
from pipectl.runs import RunDirectory
from pipectl.simulate import simulate
from pipectl.spec import SpecFile, evaluation_key, load, plan_key, profile_key
from pipectl.spec.code_sections import Data
from tests.batch.job_requests import check_table

HERE = Path(__file__).parent
RESOURCES = "resources: {nodes: 2, tasks_per_node: 3, cpus_per_task: 2, memory_per_node: 6GiB}"
PROFILE, PLAN = Path("runs/tiny.profile.json"), Path("runs/tiny.plan.json")
LINKS = ("within_node", "between_nodes")
SLOWER = {("forward", 0): 1.5, ("backward", 0): 1.25, ("forward", 1): 0.8, ("backward", 1): 1.0}
STEP = '{"attempt": 1, "step": 10, "steps": 20, "time": 1.0, "step_time_s": 2.0}\n'


@pytest.fixture
def spec(write_job, monkeypatch, tmp_path):
    """``runs`` is in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return load(write_job(RESOURCES))


def put(spec, per_node, key):
    """A cluster that was measured before."""
    cluster = assumed_cluster("measured", per_node, 1, None)
    cluster = replace(cluster, assumed=False, source="measured", key=key)
    cluster_path(spec).parent.mkdir(exist_ok=True)
    cluster.save(cluster_path(spec))
    return cluster


def test_what_is_assumed_of_an_allocation_and_of_this_machine(spec, write_job, monkeypatch):
    """The request to the planner has the limit of memory, which is none for accelerators."""
    cluster = find_cluster(spec, "slurm").cluster
    assert cluster.node_of_rank == (0, 0, 0, 1, 1, 1)
    assert [node.cores for node in cluster.nodes] == [3, 3]
    assert (cluster.device(0).memory_bytes, cluster.assumed) == (None, True)
    for usable, cores in ((8, 4), (3, 1), (1, 1)):  # which all ranks share
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, count=usable: set(range(count)))
        cluster = find_cluster(spec, "local").cluster
        assert [(node.ranks, node.cores) for node in cluster.nodes] == [(6, cores)]
    spec = load(write_job("resources: {gpus_per_node: 1, memory_per_node: 6GiB}"))
    for scheduler in ("slurm", "local"):
        assert find_cluster(spec, scheduler).cluster.device(0).memory_bytes is None
    assert spec.resources.memory_per_rank() is None


def test_a_container_sees_what_arguments_name_but_keeps_its_own_directories(
    write_job, monkeypatch, tmp_path, tmp_path_factory
):
    """Of what is not there, or is only to be made, the directory that contains it."""
    monkeypatch.setattr(mounts, "_OF_CONTAINERS", {"usr", "dev"})
    there = tmp_path_factory.mktemp("there")
    monkeypatch.setenv("HOME", str(there))
    for name in ("data", "own/inner", "logs", "work", "mine", "run/inner", "seen/x", "a:b"):
        (there / name).mkdir(parents=True)
    (there / "data/train.pt").touch()
    kwargs = {
        "path": "~/data/train.pt", "own": "~/own/inner", "others": ["~/own", {"a": "~/seen/x"}],
        "system": "/usr/bin/env", "route": "/api/v1", "device": "/dev/null", "text": "a/b",
        "here": "./new", "odd": "~/a:b",
    }  # fmt: skip
    job = write_job(
        "script: {file: ./job.yaml, directory: ~/work, arguments: [--to=$HOME/mine/x, a]}",
        "optimizer: torch.optim:SGD",
        "tracking: {tensorboard: {directory: ~/run/inner}, wandb: {dir: ~/logs/x/y}}",
        f"environment: {{container: {{image: a.sif, mounts: ['/a:{there}/seen']}}}}",
    )
    spec = load(job, [f"data.kwargs={json.dumps(kwargs)}"], check_files=False)
    binds = mounts.mounts_of(spec, there / "run", None)
    names = ("run", "data", "logs", "mine", "own", "work")
    assert binds == (there / "run", *sorted([tmp_path, *(there / name for name in names[1:])]))


GIB = 2**30


@pytest.mark.parametrize(
    ("scheduler", "section", "memory"),
    [
        ("slurm", "slurm: {options: {mem: 3G}}", GIB),
        ("slurm", "slurm: {options: {mem: '3072'}}", GIB),
        ("slurm", "slurm: {options: {mem: 0}}", None),
        ("slurm", "slurm: {options: {mem: false}}", None),
        ("slurm", "slurm: {options: {mem-per-cpu: 512MB}}", GIB),
        ("slurm", "slurm: {options: {mem-per-cpu: 512MB, exclusive: true}}", None),
        ("slurm", "pbs: {select: mem=3gb}", None),
        ("local", "slurm: {options: {mem: 3G}}", 2 * GIB),
        ("pbs", "pbs: {select: '2:ncpus=6:mem=3gb'}", GIB),
        ("pbs", "pbs: {select: 'model=x:MEM=3072mb'}", GIB),
        ("pbs", "pbs: {select: false, options: {l: [place=excl, mem=6gb]}}", GIB),
        ("pbs", "pbs: {select: vmem=3gb}", None),
    ],
)
def test_memory_that_options_of_the_batch_system_ask_for_is_a_limit(
    write_job, monkeypatch, tmp_path, scheduler, section, memory
):
    """On this machine, it is what a control group leaves; whatever describes the cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipectl.jobs.output.memory_of_machine", lambda: 12 * GIB)
    job = write_job(RESOURCES.replace(", memory_per_node: 6GiB", ""), section)
    assert find_cluster(load(job), scheduler).cluster.device(0).memory_bytes == memory
    assumed_cluster("described", [3, 3], 1, None).save(Path("described.json"))
    described = find_cluster(load(job, ["cluster=described.json"]), scheduler).cluster
    assert described.device(0).memory_bytes == (None if scheduler == "local" else memory)
    gpus = ["resources.gpus_per_node=3"]
    assert find_cluster(load(job, gpus), scheduler).cluster.device(0).memory_bytes is None


def test_of_a_range_of_nodes_a_job_gets_what_there_is(spec, write_job, monkeypatch):
    """``tasks_per_node x cpus_per_task`` cores of this machine are a node."""
    spec = load(write_job(RESOURCES.replace("nodes: 2", "nodes: 2-5")))
    for cores, nodes in ((1, 2), (18, 3), (23, 3), (64, 5)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, count=cores: set(range(count)))
        assert fit_to_allocation(spec, "local").resources.nodes == nodes
    assert fit_to_allocation(spec, "pbs").resources.nodes == 5
    assert str(fit_to_allocation(spec, "slurm").resources.nodes) == "2-5"


def test_a_walltime_that_pbs_would_read_otherwise_is_refused_wherever_pbs_is_chosen(
    write_job, monkeypatch, capsys
):
    """The job does not say that it is for PBS."""
    text, words = "resources: {walltime: 1800}", "1800 has no unit: for PBS it would be seconds"
    for name in (None, "pbs"):
        monkeypatch.setattr("pipectl.jobs.job.find_scheduler", lambda: "pbs")
        with pytest.raises(UsageError, match=words) as raised:
            choose_scheduler(load(write_job(text)), name)
        assert raised.value.hint == "write 1800s or 1800m"
        for unit in ("s", "m"):
            spec = load(write_job(text.replace("1800", f"1800{unit}")))
            assert choose_scheduler(spec, name) == "pbs"
    assert choose_scheduler(load(write_job(text)), "slurm") == "slurm"
    code = ("--set", "model.factory=torch.nn:Identity", "--set", "data.factory=torch:ones")
    command = ["submit", str(write_job()), "--scheduler", "pbs", "--dry-run", *code, "-t", "1800"]
    assert main(command) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_a_measured_cluster_is_used_on_its_machine_in_the_layout_that_the_launcher_made(
    spec, monkeypatch, scheduler
):
    cluster = put(spec, [2, 4], cluster_file_key(spec, scheduler))
    assert find_cluster(spec, scheduler) == (cluster, cluster_path(spec), "")
    assert find_cluster(spec, "pbs").warning
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert bool(find_cluster(spec, scheduler).warning) == (scheduler == "local")


def test_a_cluster_measured_for_other_settings_is_not_used(spec, tmp_path, snapshot):
    put(spec, [3, 3], cluster_file_key(spec, "slurm"))

    def use(setting):
        found = find_cluster(load(tmp_path / "job.yaml", [setting]), "slurm")
        assert found.cluster.assumed == (found.file is None) == ("it is not used" in found.warning)
        return found.warning or "used"

    check_table(snapshot, HERE / "settings_of_clusters.txt", use)


def test_what_makes_a_profile_and_a_plan_out_of_date(write_job, snapshot):
    job = write_job("resources: {nodes: 2}")
    keys = {"profile": profile_key, "plan": plan_key}
    before = {name: key(load(job)) for name, key in keys.items()}

    def changes(setting):
        spec = load(job, [setting], check_files=False)
        return " ".join(name for name, key in keys.items() if key(spec) != before[name]) or "none"

    check_table(snapshot, HERE / "settings_of_keys.txt", changes)


def test_what_a_job_asks_of_the_planner(write_job, profile, snapshot):
    """What it asks is in the key of its plan, which is not used for a job that asks otherwise."""
    job, profile = write_job("resources: {nodes: 2}"), replace(profile, epoch=(33,))

    def asked(settings):
        overrides = [setting for setting in settings if setting != "disk=measured"]
        disk = None if overrides == settings else Link(1e-4, 1e9)
        (node,) = assumed_cluster("here", [1], 1, None).nodes
        node = replace(node, device=replace(node.device, disk_link=disk))
        cluster = replace(assumed_cluster("here", [1], 1, None), nodes=(node,))
        request = make_plan_request(load(job, overrides, check_files=False), profile, cluster, None)
        return {**vars(request), "memory_key": request.memory_key}

    plain = asked([])

    def changes(given):
        values = asked(given.split()).items()
        own = [f"{key}={value}" for key, value in values if plain[key] != value]
        others = [each for each in own if not each.startswith("key=")]
        assert len(own) > len(others) or not others, "the key is another"
        return " ".join(others)

    check_table(snapshot, HERE / "planner_requests.txt", changes)


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        ("auto", ""),
        ("1", ""),
        ("any", "in training, forwards write and read 'mean', so the stage that does so has no "),
        ("2", "in training, forwards write and read 'mean', and each of 2 replicas has values of "),
    ],
)
def test_a_buffer_that_replicas_would_each_have_is_named(write_job, profile, replicas, said):
    job = write_job("resources: {nodes: 2}")
    spec = load(job, [f"pipeline.replicas={replicas}"], check_files=False)
    carries = replace(profile, carried=(("mean", "n3"), ("mean", "n4")), coupled=())
    found = replicas_warning(spec, carries)
    assert found.startswith(said)
    assert bool(found) is bool(said)
    assert replicas_warning(spec, profile) == ""
    number = coupling_warning(spec, carries)
    assert number.startswith("in training, forwards write and read 'mean': results depend on the n")
    assert (
        coupling_warning(load(job, ["pipeline.micro_batches=2"], check_files=False), carries) == ""
    )


def test_a_loss_that_was_not_compared_is_named_if_micro_batches_are_open(write_job, profile):
    unknown, job = replace(profile, loss_unknown="its loss is not finite"), write_job()
    assert "(its loss is not finite)" in loss_warning(load(job, check_files=False), unknown)
    assert loss_warning(load(job, ["pipeline.micro_batches=2"], check_files=False), unknown) == ""
    assert loss_warning(load(job, check_files=False), profile) == ""


def test_what_was_found_in_an_evaluation_is_not_said_of_another(write_job, profile):
    job = write_job("evaluation: {data: 'm:held_out', metrics: {rmse: 'm:rmse'}}")
    spec = load(job, check_files=False)
    other = load(job, ["evaluation.data=m:others"], check_files=False)
    pairs = ((0, 1),)
    found = {"uneven_metrics": ("rmse",), "shared_samples": pairs, "redrawn_samples": pairs}
    tried = replace(profile, **found, evaluation_key=evaluation_key(spec))
    for warn, words in (
        (metrics_warning, "evaluation.metrics.rmse is av"),
        (sharing_warning, "sa"),
        (splitting_warning, "each start of the job holds out other samples"),
    ):
        assert warn(spec, tried).startswith(words)
        assert warn(other, tried) == warn(spec, profile) == ""


def test_steps_of_other_batches_than_those_of_the_script_are_told(write_job, profile):
    spec = load(write_job(), check_files=False)
    ours, batch = spec.model_copy(update={"data": Data(factory="script")}), spec.training.batch_size
    other = replace(profile, script_samples=batch // 2)
    assert batch_warning(ours, other).startswith(f"a step of the script has {batch // 2} samples")
    same = replace(profile, script_samples=batch)
    fine = [(ours, same), (spec, other), (ours, profile)]
    assert [batch_warning(*each) for each in fine] == ["", "", ""]


def test_what_a_job_has_otherwise_than_its_script_with_new_arguments_is_told(write_job, profile):
    spec = load(write_job(), ["training.clip_grad_norm=1.0"], check_files=False)
    values = {
        "training.steps": spec.training.steps,
        "training.clip_grad_norm": 1,
        "evaluation.every": 5,
    }
    assert script_warning(spec, replace(profile, script_values=values)) == ""
    values |= {"training.steps": 7, "training.clip_grad_norm": None}
    told = script_warning(spec, replace(profile, script_values=values))
    steps = f"training.steps is {spec.training.steps} in the job, 7 by it"
    assert f"{steps}; training.clip_grad_norm is 1.0 in the job, null by it: set" in told


@pytest.mark.parametrize(
    ("fault", "words"),
    [({"readings": Readings.EACH}, "other samples each time"), ({"redrawn": "a.b"}, "'a.b' has ")],
)
def test_what_can_never_be_repeated_is_not_verified(write_job, profile, fault, words):
    refuse_unrepeatable(profile)
    unrepeatable = replace(profile, **fault)
    with pytest.raises(UsageError, match=words):
        refuse_unrepeatable(unrepeatable)
    warnings = warnings_of(load(write_job(), check_files=False), unrepeatable)
    assert any(words in text for text in warnings) == ("redrawn" in fault)


def test_assumed_links_make_a_range_and_measured_ones_a_point(pipeline):
    plan = pipeline(2, 4, node_of_rank=[0, 1], size_bytes=10**9)
    assumed = assumed_cluster("assumed", [1, 1], 1, None)
    fast_s, slow_s = step_range(plan, assumed)
    assert fast_s == pytest.approx(simulate(plan, assumed.with_slower_links(0.0)).step_time_s)
    assert slow_s == simulate(plan, assumed.with_slower_links(SLOWEST_ASSUMED[1])).step_time_s
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
    replace(timeline, step=12, differs="its batch had 1 of 8 samples").save(run.measured_of(12))
    with pytest.raises(UsageError, match="no step with the batch of its plan is recorded"):
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
    evaluated = STEP.replace('"step_time_s": 2.0', '"evaluation": {"loss": 1.0}')
    with run.metrics.open("a") as stream:
        stream.write(evaluated)
    assert correct_profile(run).rows is not None, "also if the step was evaluated"
    replace(timeline, step=11).save(run.measured_of(11))
    both = correct_profile(run)
    disturbed = STEP.replace('"step": 10', '"step": 11')[:-2]
    with run.metrics.open("a") as stream:
        stream.write(f'{disturbed}, "processor": {{"share": 0.5, "ranks": 1}}}}\n')
        stream.write(evaluated.replace('"step": 10', '"step": 11'))
    alone = correct_profile(run)
    assert (alone.operators, both.operators != found.operators) == (found.operators, True), (
        "without step 11"
    )
    assert found.source == "test; corrected by 20261125-120000-tiny"
    found.save(run.profile)
    assert correct_profile(run).source == found.source, "which names the run once"


@pytest.fixture
def sweep(write_job, profile, monkeypatch, tmp_path):
    """``sweep("slurm", "sweep.grid={...}")``: the jobs of its points; there is a fresh profile."""
    monkeypatch.chdir(tmp_path)
    job = write_job("pipeline: {stages: 2, micro_batches: 4}", "resources: {nodes: 2}")
    PROFILE.parent.mkdir()

    def prepared(scheduler, *changes):
        file = SpecFile.read(job, changes)
        spec = file.spec()
        replace(profile, key=profile_key(spec)).save(PROFILE)
        return prepare(spec, scheduler, points=file.points(spec))

    return prepared


def test_on_this_machine_models_are_measured_and_planned_once_each(sweep, profile, monkeypatch):
    measured = []

    def measure(spec, path, _progress):
        assert path is None, "the job's own place is that of its own model"
        measured.append(spec.model.kwargs)
        return replace(profile, key=profile_key(spec))

    monkeypatch.setattr("pipectl.jobs.profiles.measure", measure)
    models = "model.kwargs: [{}, {width: 3}, {width: 4}]"
    found = sweep("local", f"sweep.grid={{{models}, training.seed: [0, 1]}}")
    assert measured == [{"width": 3}, {"width": 4}]
    plans = [id(inputs.plan) for inputs in found]
    assert plans == [plans[0]] * 2 + [plans[2]] * 2 + [plans[4]] * 2
    assert all(inputs.profile for inputs in found)


def test_all_points_keep_the_micro_batches_of_the_last_plan(sweep):
    """As they do if they are planned in their allocations."""
    sweep("slurm", "pipeline.micro_batches=2", "sweep.points=[{training.seed: 1}]")
    for _ in range(2):
        grid = "sweep.grid={pipeline.schedule: [1f1b, gpipe]}"
        found = sweep("slurm", "pipeline.micro_batches=auto", grid)
        assert [job.plan.micro_batches for job in found] == [2, 2]


def test_a_job_that_may_lack_the_modules_of_the_shell_is_noted(write_job, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    monkeypatch.setenv("LOADEDMODULES", "gcc/13:openmpi/5")

    def note(scheduler, key="name=x"):
        spec = load(write_job(), [key], check_files=False)
        return note_of_modules(make_job(spec, scheduler, mpi=MpiChoice("auto")))

    assert "has loaded: gcc/13, openmpi/5; environment.modules" in note("slurm")
    assert note("slurm") == note("pbs")
    for key in ("modules=[openmpi/5]", "setup=[source x]", "inherit=all"):
        assert note("slurm", f"environment.{key}") == ""
    assert note("local") == ""
    monkeypatch.delenv("LOADEDMODULES")
    assert note("slurm") == ""
