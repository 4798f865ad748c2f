"""A dumped spec means the same in another directory and under other site files."""

from pathlib import Path

import pytest

from pipectl.spec import JobSpec, dump, links_key, load, plan_key, profile_key


@pytest.fixture
def job(tmp_path, minimal):
    """A spec that names files beside it."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("model.py", "cluster.json"):
        (home / name).write_text(name)
    text = minimal.replace("torch.nn:Linear", "./model.py:build").replace(
        "torch.nn:MSELoss}", "./model.py:loss, weight: ./model.py:weight}"
    )
    (home / "job.yaml").write_text(
        text
        + "evaluation: {data: ./model.py:held_out, metrics: {m: ./model.py:m, weight: {factory: "
        + "./model.py:w, kwargs: {q: 1}}}}\n"
        + "cluster: cluster.json\n"
        + "resources: {nodes: 2, walltime: 1:30:00, memory_per_node: 8GiB}\n"
        + "pipeline: {stages: 2, warm_up: [2, 1], memory_limit: 64MiB}\n"
    )
    return home / "job.yaml"


def reload(spec: JobSpec, path: Path) -> JobSpec:
    path.write_text(dump(spec))
    return load(path, sites=())


def test_a_dump_is_read_back_the_same_from_another_directory(job, tmp_path):
    """Keys do not depend on where the files are, either."""
    (job.parent / "mine.csv").write_text("0F0,0B0\n1F0,1B0\n")
    for image in ("pipectl.sif", "docker://example.org/pipectl"):
        own = [f"environment.container.image={image}", "pipeline={schedule: mine.csv}"]
        spec = load(job, own, sites=())
        again = reload(spec, tmp_path / "run.yaml")
        assert dump(again) == dump(spec)
        assert again.environment == spec.environment
        for key_of in (profile_key, plan_key, lambda spec: links_key(spec, "slurm", "here")):
            assert key_of(again) == key_of(spec)
    home = job.parent
    assert again.model.factory == f"{home}/model.py:build"
    assert again.loss.weight == f"{home}/model.py:weight"
    metrics = again.evaluation.metrics
    assert metrics["m"].factory == f"{home}/model.py:m"
    weight = metrics["weight"]  # the name of a key of the loss
    assert (weight.factory, weight.kwargs) == (f"{home}/model.py:w", {"q": 1})
    assert again.cluster == f"{home}/cluster.json"
    assert again.site_defaults is False
    assert (again.resources, again.optimizer) == (spec.resources, spec.optimizer)


def test_site_files_no_longer_matter(job, tmp_path):
    site, run = tmp_path / "site.yaml", tmp_path / "run.yaml"
    site.write_text("slurm: {account: mine}\nenvironment: {variables: {A: 1}}")
    run.write_text(dump(load(job, ["training.steps=77"], sites=(site,))))
    site.write_text("slurm: {account: yours, qos: low}\nenvironment: {variables: {B: 1}}")
    again = load(run, sites=(site,))
    assert (again.slurm.account, again.slurm.options) == ("mine", {})
    assert (again.environment.variables, again.training.steps) == ({"A": "1"}, 77)


VALUES = [
    "3e-4", "1e5", "0o17", "true", "null", "~", "yes", "1:30", "", " a ", "a: b", "#x", "é", "😀",
    "a\nb", "tab\there", "*x", "- a", "2026-01-01", "=", "<<", "!x", "%x", "'", '"', "\\",
    3e-4, 1e300, 0.1, -0.0, 10**25, True, None, float("inf"),
]  # fmt: skip


def test_values_keep_their_type(read, minimal, tmp_path):
    spec = read(minimal)
    kwargs = {"values": VALUES, "keys": [{value: 1} for value in VALUES]}
    optimizer = spec.optimizer.model_copy(update={"kwargs": kwargs})
    again = reload(spec.model_copy(update={"optimizer": optimizer}), tmp_path / "run.yaml")
    assert repr(again.optimizer.kwargs) == repr(kwargs)


BOTH = (
    "model.kwargs.in_features=5", "model.kwargs={1: {2: a, b: c}}", "loss.factory=./model.py:other",
    "loss.weight=samples", "optimizer.kwargs.weight_decay=1", "training.batch_size=16",
    "pipeline.micro_batches=4", "resources.cpus_per_task=3", "launch.progress=core",
    "resources.gpus_per_node=0", "optimizer.groups=[{match: '*.bias', weight_decay: 0}]",
)  # fmt: skip
PLAN = (
    "resources.gpus_per_node=2", "pipeline.schedule=1f1b", "pipeline.memory_limit=1GiB",
    "resources.nodes=3", "cluster=null", "evaluation.batch_size=7",
)  # fmt: skip
NEITHER = (
    "optimizer.kwargs.lr=1", "launch.bind=cores", "resources.walltime=1h", "training.steps=77",
    "name=other", "output.directory=elsewhere", "evaluation.every=5", "data.shuffle=false",
)  # fmt: skip


@pytest.mark.parametrize("override", [*BOTH, *PLAN, *NEITHER])
def test_keys_change_with_what_they_stand_for(job, override):
    always = ["resources.gpus_per_node=1", "resources.cpus_per_task=2"]
    before, after = load(job, always, sites=()), load(job, [*always, override], sites=())
    assert (profile_key(before) != profile_key(after)) == (override in BOTH)
    assert (plan_key(before) != plan_key(after)) == (override not in NEITHER)


def test_the_key_of_a_plan_changes_with_held_out_data_only_if_their_number_may_count(job):
    """As many samples as a micro-batch has never take more memory than a step."""
    for size, changes in (("null", False), ("7", True)):
        always = [f"evaluation.batch_size={size}"]
        other = [*always, "evaluation.data.factory=./model.py:other"]
        before, after = (load(job, overrides, sites=()) for overrides in (always, other))
        assert (plan_key(before) != plan_key(after)) == changes


def test_keys_change_with_the_contents_of_the_files(job):
    """Also of those that they import."""
    (job.parent / "model.py").write_text("import layers\n")
    (job.parent / "layers.py").write_text("width = 1\n")
    spec = load(job, sites=())
    profile, plan = profile_key(spec), plan_key(spec)
    assert (profile_key(spec), plan_key(spec)) == (profile, plan)
    (job.parent / "cluster.json").write_text("other")
    assert profile_key(spec) == profile
    assert plan_key(spec) != plan
    plan = plan_key(spec)
    (job.parent / "layers.py").write_text("width = 2\n")
    assert profile_key(spec) != profile
    assert plan_key(spec) != plan
