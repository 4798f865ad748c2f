"""Layers of values: machine < user < job file < command line; and where each value is from."""

from operator import attrgetter
from pathlib import Path

import pytest

from pipectl.errors import SpecError
from pipectl.spec import JobSpec, dump, load, site_files

SHORT = """\
{version: 1, name: demo, model: a:model, loss: a:loss, data: a:data, optimizer: a:optimizer,
 training: {steps: 10, batch_size: 8}, evaluation: {data: a:held_out, metrics: {m: a:metric}},
 callbacks: {c: a:callback}}
"""


@pytest.fixture
def layered(spec_file, minimal):
    """Read the minimal spec with additions above two site files, beside it."""

    def read_layers(machine="", user="", job="", *overrides):
        return spec_file(minimal + job, *overrides, machine=machine, user=user)

    return read_layers


def test_each_layer_is_over_the_one_before(layered):
    """Mappings are merged, lists replaced, and null removes a value of a layer below."""
    file = layered(
        "slurm: {partition: machine, account: a, options: {qos: q, mem: 0}}\n"
        "environment: {modules: [gcc, mpich], variables: {A: 1, B: 1, D: s3cret}}\n"
        "launch: {args: [-v]}\n",
        "slurm: {partition: user, options: {qos: r, hold: true}}\n"
        "environment: {modules: [clang], variables: {B: 2, factory: 2}}\n",
        "resources: {nodes: 2, memory_per_node: 8GB}\n"
        "slurm:\n  account: null\n  options: {hold: null}\n"
        "launch:\n"
        "environment: {variables: {A: ~, C: 3}}\n"
        "checkpoint: {keep: null}\n"
        "optimizer:\n  kwargs:\n    lr: 0.1\n    decay: null\n"
        "lr_scheduler: torch.optim.lr_scheduler:ConstantLR\n"
        "pipeline: {memory_limit: 1.5GiB}\n",
        *("resources.tasks_per_node=4", "optimizer.kwargs.b=1", "slurm.options.nice=1"),
        "training.steps=3",
    )
    found = {}
    for path, value, place in map(attrgetter("path", "value", "place"), file.origins(file.spec())):
        found[".".join(map(str, path))] = value, place and f"{place.file}:{place.line}"
    expected = {
        "training.steps": (3, "--set training.steps:0"),
        "training.batch_size": (8, "job.yaml:6"),
        "model.kwargs.in_features": (4, "job.yaml:3"),
        "resources.nodes": (2, "job.yaml:7"),
        "resources.memory_per_node": ("7812500KiB", "job.yaml:7"),
        "resources.tasks_per_node": (4, "--set resources.tasks_per_node:0"),
        "resources.walltime": ("01:00:00", None),
        "slurm.partition": ("user", "user.yaml:1"),
        "slurm.account": (None, None),
        "slurm.options.qos": ("r", "user.yaml:1"),
        "slurm.options.mem": ("0", "machine.yaml:1"),
        "slurm.options.nice": ("1", "--set slurm.options.nice:0"),
        "environment.modules": (["clang"], "user.yaml:2"),
        "environment.variables.B": ("(not shown)", "user.yaml:2"),
        "launch.args": ([], None),
        "checkpoint.keep": (3, None),
        "optimizer.factory": ("torch.optim:AdamW", None),
        "optimizer.kwargs.lr": (0.1, "job.yaml:16"),
        "optimizer.kwargs.decay": (None, "job.yaml:17"),
        "optimizer.kwargs.b": (1, "--set optimizer.kwargs.b:0"),
        "lr_scheduler.factory": ("torch.optim.lr_scheduler:ConstantLR", "job.yaml:18"),
        "lr_scheduler.kwargs": ({}, None),
        "pipeline.memory_limit": ("1536MiB", "job.yaml:19"),
    }
    assert {key: found[key] for key in expected} == expected
    assert "slurm.options.hold" not in found
    variables = {"B": "2", "C": "3", "D": "s3cret", "factory": "2"}
    assert file.spec().environment.variables == variables
    assert "s3cret" not in str(found)
    assert list(dict.fromkeys(key.partition(".")[0] for key in found)) == list(JobSpec.model_fields)
    assert all(f"{key.rpartition('.')[2]}:" in dump(file.spec()) for key in found)


def test_files_of_a_site_file_are_looked_up_beside_it(layered, tmp_path):
    for name in ("cluster.json", "around.sh"):
        (tmp_path / name).touch()
    spec = layered("", "cluster: ./cluster.json").spec()
    assert spec.cluster == str(tmp_path / "cluster.json")


def test_jobs_can_do_without_site_files(layered):
    account = "slurm: {account: q}"
    assert layered(account, "x: 1", "site_defaults: false\n").spec().slurm.account is None
    assert layered(account, "", "", "site_defaults=false").spec().slurm.account is None
    nothing = layered("# nothing\n").spec()
    assert nothing == load(Path("job.yaml"), sites=[Path("absent.yaml")])


def test_problems_of_all_layers_are_reported_together(layered):
    file = layered("slurm: {a: 1}", "pbs: {b: 1}", "output: {c: 1}", "training.steps=0")
    with pytest.raises(SpecError) as caught:
        file.spec()
    files = [problem.file for problem in caught.value.problems]
    assert files == ["--set training.steps", "job.yaml", "machine.yaml", "user.yaml"]


def test_where_site_files_are_looked_for(tmp_path, minimal, monkeypatch):
    machine = Path("/etc/pipectl/site.yaml")
    user = tmp_path / ".config" / "pipectl" / "site.yaml"
    monkeypatch.setenv("HOME", str(tmp_path))
    for configured in ("", "relative", "/config"):
        monkeypatch.setenv("XDG_CONFIG_HOME", configured)
        own = Path("/config/pipectl/site.yaml") if configured == "/config" else user
        assert site_files() == (machine, own)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    user.parent.mkdir(parents=True)
    user.write_text("pbs: {queue: site}")
    (tmp_path / "job.yaml").write_text(minimal)
    assert load(tmp_path / "job.yaml").pbs.queue == "site"


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.groups=[{match: '*.bias', weight_decay: 0}]",
        "model.materialize=per_rank",
        "model.opaque=[router]",
        "loss.weight=a:weight",
        "data.workers=2",
        "evaluation.data.kwargs.count=5",
        "evaluation.metrics.m.kwargs.k=5",
        "callbacks.c.kwargs.project=p",
    ],
)
def test_every_key_joins_a_factory_in_short_form(read, override):
    before, after = read(SHORT), read(SHORT, override)
    assert set(before.factories()) <= set(after.factories())
    assert after != before


@pytest.mark.parametrize("section", ["tensorboard", "{tensorboard: {}}"])
def test_a_key_joins_a_tracker_in_short_form(read, section):
    text = SHORT.replace("callbacks", f"tracking: {section}, callbacks")
    tracking = read(text, "tracking.wandb.project=p").tracking
    assert tracking.tensorboard == {}
    assert tracking.wandb == {"project": "p"}
    assert tracking == read(SHORT, "tracking=tensorboard", "tracking.wandb.project=p").tracking
