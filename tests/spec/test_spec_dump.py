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
        + "pipeline: {stages: 2, warm_up: [2, 1]}\n"
    )
    return home / "job.yaml"


def reload(spec: JobSpec, path: Path) -> JobSpec:
    path.write_text(dump(spec))
    return load(path, sites=())


def with_kwargs(spec: JobSpec, kwargs: dict[str, object]) -> JobSpec:
    optimizer = spec.optimizer.model_copy(update={"kwargs": kwargs})
    return spec.model_copy(update={"optimizer": optimizer})


def test_a_dump_is_read_back_the_same_from_another_directory(job, tmp_path):
    spec = load(job, sites=())
    again = reload(spec, tmp_path / "run.yaml")
    assert dump(again) == dump(spec)
    assert again.model.factory == f"{job.parent / 'model.py'}:build"
    assert again.loss.weight == f"{job.parent / 'model.py'}:weight"
    assert again.evaluation is not None
    assert again.evaluation.metrics["m"].factory == f"{job.parent / 'model.py'}:m"
    weight = again.evaluation.metrics["weight"]  # the name of a key of the loss
    assert (weight.factory, weight.kwargs) == (f"{job.parent / 'model.py'}:w", {"q": 1})
    assert again.cluster == str(job.parent / "cluster.json")
    assert again.site_defaults is False
    for name in ("training", "pipeline", "resources", "optimizer"):
        assert getattr(again, name) == getattr(spec, name)


def test_site_files_no_longer_matter(job, tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text("slurm: {account: mine}\nenvironment: {variables: {A: 1}}")
    run = tmp_path / "run.yaml"
    run.write_text(dump(load(job, ["training.steps=77"], sites=(site,))))
    site.write_text(
        "slurm: {account: yours, options: {qos: low}}\nenvironment: {variables: {B: 1}}"
    )
    again = load(run, sites=(site,))
    assert (again.slurm.account, again.slurm.options) == ("mine", {})
    assert (again.environment.variables, again.training.steps) == ({"A": "1"}, 77)


@pytest.mark.parametrize(
    "text",
    ["3e-4", "1e5", "0o17", "true", "null", "~", "yes", "1:30", "", " a ", "a: b", "#x", "é", "😀",
     "a\nb", "tab\there", "*x", "- a", "2026-01-01", "=", "<<", "!x", "%x", "'", '"', "\\"],
)  # fmt: skip
def test_texts_stay_texts(read, minimal, tmp_path, text):
    kwargs = {"value": text, "key": {text: 1}}
    assert (
        reload(with_kwargs(read(minimal), kwargs), tmp_path / "run.yaml").optimizer.kwargs == kwargs
    )


@pytest.mark.parametrize("number", [3e-4, 1e300, 0.1, -0.0, 10**25, True, None, float("inf")])
def test_values_keep_their_type(read, minimal, tmp_path, number):
    kwargs = {"x": number, "y": [{number: number}]}
    again = reload(with_kwargs(read(minimal), kwargs), tmp_path / "run.yaml")
    assert repr(again.optimizer.kwargs) == repr(kwargs)


@pytest.mark.parametrize("image", ["pipectl.sif", "docker://example.org/pipectl"])
def test_an_image_stays_what_the_job_names(job, tmp_path, image):
    spec = load(job, [f"environment.container={image}"], sites=())
    again = reload(spec, tmp_path / "run.yaml")
    assert again.environment == spec.environment
    assert links_key(again, "slurm here") == links_key(spec, "slurm here")


def test_keys_do_not_depend_on_where_files_are(job, tmp_path):
    (job.parent / "mine.csv").write_text("0F0,0B0\n1F0,1B0\n")
    for own in ([], ["pipeline={schedule: mine.csv}"]):
        spec = load(job, own, sites=())
        again = reload(spec, tmp_path / "run.yaml")
        assert profile_key(again) == profile_key(spec)
        assert plan_key(again) == plan_key(spec)


@pytest.mark.parametrize(
    ("override", "profile_changes", "plan_changes"),
    [
        ("model.kwargs.in_features=5", True, True),
        ("model.kwargs={1: {2: a, b: c}}", True, True),
        ("loss.factory=./model.py:other", True, True),
        ("loss.weight=samples", True, True),
        ("optimizer.kwargs.weight_decay=1", True, True),
        ("optimizer.kwargs.lr=1", False, False),
        ("training.batch_size=16", True, True),
        ("pipeline.micro_batches=4", True, True),
        ("resources.cpus_per_task=3", True, True),
        ("launch.progress=core", True, True),
        ("resources.gpus_per_node=0", True, True),
        ("resources.gpus_per_node=2", False, True),
        ("pipeline.schedule=1f1b", False, True),
        ("pipeline.memory_limit=1GiB", False, True),
        ("resources.nodes=3", False, True),
        ("launch.bind=cores", False, False),
        ("cluster=null", False, True),
        ("resources.walltime=1h", False, False),
        ("training.steps=77", False, False),
        ("name=other", False, False),
        ("output.directory=elsewhere", False, False),
        ("evaluation.every=5", False, False),
        ("data.shuffle=false", False, False),
    ],
)
def test_keys_change_with_what_they_stand_for(job, override, profile_changes, plan_changes):
    always = ["resources.gpus_per_node=1", "resources.cpus_per_task=2"]
    before, after = load(job, always, sites=()), load(job, [*always, override], sites=())
    assert (profile_key(before) != profile_key(after)) == profile_changes
    assert (plan_key(before) != plan_key(after)) == plan_changes


def test_keys_change_with_the_contents_of_the_files(job):
    spec = load(job, sites=())
    before = profile_key(spec), plan_key(spec)
    (job.parent / "cluster.json").write_text("other")
    between = profile_key(spec), plan_key(spec)
    assert between[0] == before[0]
    assert between[1] != before[1]
    (job.parent / "model.py").write_text("other")
    assert profile_key(spec) != between[0]
    assert plan_key(spec) != between[1]
