"""Layers of values: machine < user < job file < command line."""

# ruff: noqa: E501 (a message is one line)

from pathlib import Path

import pytest

from pipectl.errors import SpecError, UsageError
from pipectl.spec import load, site_files

SHORT = """\
{version: 1, name: demo, model: a:model, loss: a:loss, data: a:data, optimizer: a:optimizer,
 training: {steps: 10, batch_size: 8}, evaluation: {data: a:held_out, metrics: {m: a:metric}},
 callbacks: {c: a:callback}}
"""


@pytest.fixture
def layered(tmp_path, minimal):
    """Load the minimal spec with additions above two site files."""

    def load_layers(machine, user, job="", *overrides):
        for name, text in (("machine", machine), ("user", user), ("job", minimal + job)):
            (tmp_path / f"{name}.yaml").write_text(text)
        sites = (tmp_path / "machine.yaml", tmp_path / "user.yaml")
        return load(tmp_path / "job.yaml", overrides, sites=sites)

    return load_layers


def test_each_layer_is_over_the_one_before(layered):
    partitions = [f"slurm: {{partition: {name}}}\n" for name in ("machine", "user", "job")]
    assert layered(partitions[0], "").slurm.partition == "machine"
    assert layered(*partitions[:2]).slurm.partition == "user"
    assert layered(*partitions).slurm.partition == "job"
    assert layered(*partitions, "slurm.partition=flag").slurm.partition == "flag"


def test_mappings_are_merged_and_lists_replaced(layered):
    spec = layered(
        "slurm: {account: a, options: {qos: q, mem: 0}}\n"
        "environment: {modules: [gcc, mpich], variables: {A: 1, B: 1}}",
        "slurm: {options: {qos: r, hold: true}}\nenvironment: {modules: [clang], variables: {B: 2, factory: 2}}",
        "slurm: {partition: p, options: {hold: null}}\nenvironment: {variables: {C: 3}}",
    )
    assert (spec.slurm.account, spec.slurm.partition) == ("a", "p")
    assert spec.slurm.options == {"qos": "r", "mem": "0"}
    assert spec.environment.modules == ("clang",)
    assert spec.environment.variables == {"A": "1", "B": "2", "factory": "2", "C": "3"}


def test_null_removes_a_site_default(layered):
    spec = layered(
        "slurm: {account: a}\nlaunch: {args: [-v]}\nenvironment: {variables: {A: 1}}",
        "",
        "slurm: {account: null}\nlaunch:\nenvironment: {variables: {A: ~}}",
    )
    assert spec.slurm.account is None
    assert spec.launch.args == ()
    assert spec.environment.variables == {}


def test_files_of_a_site_file_are_looked_up_beside_it(layered, tmp_path):
    (tmp_path / "cluster.json").write_text("{}")
    (tmp_path / "around.sh").write_text("")
    spec = layered("", "cluster: ./cluster.json\nlaunch: {template: around.sh}")
    assert spec.cluster == str(tmp_path / "cluster.json")
    assert spec.launch.template == str(tmp_path / "around.sh")
    with pytest.raises(SpecError) as caught:
        layered("", "cluster: ./cluster.json\nlaunch: text\nname: x")
    assert [problem.message.partition(": ")[0] for problem in caught.value.problems] == [
        "launch",
        "name",
    ]


def test_jobs_can_do_without_site_files(layered):
    assert layered("slurm: {account: q}", "x: 1", "site_defaults: false\n").slurm.account is None
    assert layered("slurm: {account: q}", "", "", "site_defaults=false").slurm.account is None


def test_absent_and_empty_site_files_say_nothing(tmp_path, minimal):
    (tmp_path / "job.yaml").write_text(minimal)
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    sites = (tmp_path / "absent.yaml", tmp_path / "empty.yaml")
    assert load(tmp_path / "job.yaml", sites=sites) == load(tmp_path / "job.yaml", sites=())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("checkpoint: {keep: 0}", "1:20: checkpoint.keep: must be a whole number of at least 1, not 0"),
        ("slurm: {part: a}", "1:9: slurm.part: unknown key; did you mean 'partition'?"),
        ("version: 2", "1:10: version: is 2; this pipectl reads version 1"),
        ("a: [", "1:5: not valid YAML: it ends inside a bracket that is not closed"),
        ("- a", " must be a mapping of keys to values"),
        ("\ntraining: {steps: 3}", "2:1: training: a site file cannot set this; known are version, resources, launch, environment, checkpoint, trace, output, cluster, slurm, pbs"),
    ],
)  # fmt: skip
def test_problems_name_the_site_file(layered, tmp_path, text, message):
    with pytest.raises(SpecError) as caught:
        layered("", text)
    assert caught.value.message == f"{tmp_path / 'user.yaml'}:{message}"


def test_problems_of_all_layers_are_reported_together(layered):
    with pytest.raises(SpecError) as caught:
        layered("slurm: {a: 1}", "pbs: {b: 1}", "output: {c: 1}", "training.steps=0")
    files = [Path(problem.file).name for problem in caught.value.problems]
    assert files == ["--set training.steps", "job.yaml", "machine.yaml", "user.yaml"]


def test_where_site_files_are_looked_for(tmp_path, minimal, monkeypatch):
    machine = Path("/etc/pipectl/site.yaml")
    user = tmp_path / ".config" / "pipectl" / "site.yaml"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert site_files({}) == site_files({"XDG_CONFIG_HOME": "relative"}) == (machine, user)
    configured = Path("/config/pipectl/site.yaml")
    assert site_files({"XDG_CONFIG_HOME": "/config"}) == (machine, configured)
    user.parent.mkdir(parents=True)
    user.write_text("pbs: {queue: site}")
    (tmp_path / "job.yaml").write_text(minimal)
    assert load(tmp_path / "job.yaml").pbs.queue == "site"


def test_overrides_are_read_like_the_file(read, minimal):
    spec = read(
        minimal,
        "resources={nodes: 5, walltime: 1:30:00}",
        "resources.nodes=4",
        "slurm.account=0042",
        "slurm.options.mail-type=END",
        "pbs.select=model=icelake",
        "launch.args=[--label, '-v']",
    )
    assert (spec.resources.nodes, spec.resources.walltime) == (4, 5400)
    assert (spec.slurm.account, spec.slurm.options) == ("0042", {"mail-type": "END"})
    assert (spec.pbs.select, spec.launch.args) == ("model=icelake", ("--label", "-v"))


def test_only_the_named_key_is_replaced(read, minimal):
    spec = read(minimal, "model.kwargs.in_features=9", "training.steps=3")
    assert spec.model.kwargs == {"in_features": 9, "out_features": 2}
    assert (spec.training.steps, spec.training.batch_size) == (3, 8)
    assert read(minimal, "model.kwargs={}").model.kwargs == {}
    kwargs = read(minimal, "model.factory=a.b:c").model.kwargs
    assert kwargs == {"in_features": 4, "out_features": 2}


def test_nothing_or_null_restores_the_default(read, minimal):
    text = minimal + "slurm: {partition: debug, account: a}\n"
    spec = read(text, "slurm.partition=", "slurm.account=null")
    assert (spec.slurm.partition, spec.slurm.account) == (None, None)


def test_a_wrong_value_in_the_file_may_be_overridden(read, minimal):
    assert read(minimal.replace("steps: 10", "steps: ten"), "training.steps=3").training.steps == 3


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


def test_a_key_whose_text_becomes_a_mapping_stays_in_its_place(complaints, minimal):
    found = complaints(minimal.replace("{steps: 10, batch_size: 8}", "many"), "training.steps=3")
    assert found == ["job.yaml:6:1: training.batch_size: missing"]


def test_text_that_is_no_factory_is_replaced(read, minimal):
    spec = read(minimal + "callbacks: a:callback\n", "callbacks.c=a:callback")
    assert list(spec.callbacks) == ["c"]
    text = minimal.replace("in_features: 4", "in_features: four")
    spec = read(text, "model.kwargs.in_features.kwargs=5")
    assert spec.model.kwargs["in_features"] == {"kwargs": 5}


@pytest.mark.parametrize(
    ("override", "message", "cure"),
    [
        ("pipeline.stages", "--set pipeline.stages: there is no '='", "write --set KEY=VALUE, such as --set pipeline.stages=4"),
        ("=3", "--set =3: a key is missing before '='", "write --set KEY=VALUE, such as --set pipeline.stages=4"),
        ("a..b=2", "--set a..b=2: a key is missing before '='", "write --set KEY=VALUE, such as --set pipeline.stages=4"),
        ("launch.args=[", "--set launch.args: not valid YAML: it ends inside a bracket that is not closed", "quote the value as YAML does"),
        ("name=\x1b", "--set name: contains the unprintable character U+001B; remove it", "quote the value as YAML does"),
        ("\x1b", "--set \\x1b: there is no '='", "write --set KEY=VALUE, such as --set pipeline.stages=4"),
        ("a" + ".a" * 5000 + "=1", f"--set a{'.a' * 48}...: there is no such key", "write --set KEY=VALUE, such as --set pipeline.stages=4"),
    ],
)  # fmt: skip
def test_what_is_no_override(read, minimal, override, message, cure):
    with pytest.raises(UsageError) as caught:
        read(minimal, override)
    assert (caught.value.message, caught.value.cure) == (message, cure)


def test_a_file_that_cannot_be_read_is_reported_before_overrides(read):
    with pytest.raises(SpecError, match="empty"):
        read("", "no override")
