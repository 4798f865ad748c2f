"""What a valid spec is read as."""

from contextlib import nullcontext
from functools import reduce
from pathlib import Path

import pytest

from pipectl.errors import SpecError
from pipectl.spec import dump, load
from pipectl.units import NodeRange

HERE = Path(__file__).parent


def test_a_job_that_says_everything(tmp_path, snapshot, by_schema):
    """``full.yaml``, and as what it is read, with all defaults."""
    assert by_schema((HERE / "full.yaml").read_text())
    (tmp_path / "models").mkdir()
    for name in ("gpt.py", "text.py"):
        (tmp_path / "models" / name).touch()
    (tmp_path / "job.yaml").write_bytes((HERE / "full.yaml").read_bytes())
    spec = load(tmp_path / "job.yaml", sites=())
    snapshot(HERE / "full_as_read.yaml", dump(spec).replace(str(tmp_path), "/home/me"))
    assert spec.resources.ranks == 4


def value_at(spec, key):
    """The value at a dotted key, which may go through a mapping."""
    names = key.split(".")
    return reduce(lambda at, n: at[n] if isinstance(at, dict) else getattr(at, n), names, spec)


GPUS = "resources.gpus_per_node"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("resources: {walltime: 90, nodes: 1e0}", {"resources.walltime": 5400}),
        ("resources: {nodes: 2-8}", {"resources.nodes": NodeRange(2, 8), "resources.ranks": 8}),
        ("resources: {nodes: '3 - 3'}", {"resources.nodes": 3}),
        ("resources: {walltime: 90s}", {"resources.walltime": 90}),
        ("resources: {walltime: '00:05:00'}", {"resources.walltime": 300}),
        ("resources: {memory_per_node: 134217728.5}", {"resources.memory_per_node": 2**27}),
        ("checkpoint: {every: 1e3}", {"checkpoint.every": 1000}),
        ("slurm: &site {account: physics}\npbs: *site", {"pbs.account": "physics"}),
        ("optimizer: torch.optim:SGD", {"optimizer.factory": "torch.optim:SGD"}),
        ("pipeline: {stages: auto, warm_up: auto, schedule: auto}", {"pipeline.stages": None}),
        # Options may ask for GPUs if resources say how many.
        ("slurm: {options: {gres: gpu:2}}\nresources: {gpus_per_node: 2}", {GPUS: 2}),
        ("slurm: {options: {gres: gpu:2}}\nresources: {gpus_per_node: 0}", {GPUS: 0}),
        (
            "slurm: {options: {gpus: 6, gpus-per-socket: 1}}\n"
            "resources: {nodes: 3, gpus_per_node: 2}",
            {GPUS: 2},
        ),
        (
            "slurm: {options: {gpus-per-task: 1}}\n"
            "resources: {tasks_per_node: 2, gpus_per_node: 2}",
            {GPUS: 2},
        ),
        ("pbs: {select: naccelerators=2}\nresources: {nodes: 2, gpus_per_node: 2}", {GPUS: 2}),
        ("slurm: {options: {gres: 'gpu:0,nvme:1', gpus: 0, gpus-per-node: false}}", {GPUS: 0}),
        ("pbs: {select: 'gpu_model=none:ngpus=0', options: {h: true}}", {GPUS: 0}),
    ],
)
def test_values_may_be_spelt_in_several_ways(read, by_schema, minimal, text, values):
    """The JSON Schema accepts them, too."""
    spec = read(minimal + text)
    assert {key: value_at(spec, key) for key in values} == values
    assert by_schema(minimal + text)


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (
            ["resources={nodes: 5, walltime: 1:30:00}", "resources.nodes=4"],
            {"resources.nodes": 4, "resources.walltime": 5400},
        ),
        (["slurm.account=0042"], {"slurm.account": "0042"}),
        (["slurm.options.mail-type=END"], {"slurm.options": {"mail-type": "END"}}),
        (["pbs.select=model=icelake"], {"pbs.select": "model=icelake"}),
        (["launch.args=[--label, '-v']"], {"launch.args": ("--label", "-v")}),
        (["training.steps=3"], {"training.steps": 3, "training.batch_size": 8}),
        (["model.kwargs.in_features=9"], {"model.kwargs": {"in_features": 9, "out_features": 2}}),
        (["model.kwargs={}"], {"model.kwargs": {}}),
        (["model.factory=a.b:c"], {"model.kwargs": {"in_features": 4, "out_features": 2}}),
        (["slurm={account: a}", "slurm.account="], {"slurm.account": None}),
        (["slurm={account: a}", "slurm.account=null"], {"slurm.account": None}),
        # What is wrong below may be replaced, and text that is no factory becomes a mapping.
        (["training.steps=ten", "training.steps=3"], {"training.steps": 3}),
        (["model.kwargs.x=text", "model.kwargs.x.kwargs=5"], {"model.kwargs.x": {"kwargs": 5}}),
        (["callbacks=a:callback", "callbacks.c=a:callback"], {"callbacks.c.kwargs": {}}),
    ],
)
def test_overrides_are_read_like_the_file(read, minimal, overrides, values):
    spec = read(minimal, *overrides)
    assert {key: value_at(spec, key) for key in values} == values


def test_stages_go_round_over_the_ranks_of_one_replica(read, minimal):
    text = "pipeline: {stages: 6, schedule: interleaved, replicas: 2}\nresources: {nodes: 4}\n"
    assert read(minimal + text).pipeline.stages == 6


@pytest.mark.parametrize(
    ("file", "name"),
    [("gpt.yaml", "gpt"), ("my job (2).yaml", "my-job--2"), ("-.yaml", "job"), ("é.v2.yaml", "v2")],
)
def test_the_name_is_by_default_that_of_the_file(tmp_path, minimal, file, name):
    (tmp_path / file).write_text("".join(minimal.splitlines(keepends=True)[2:]))
    spec = load(tmp_path / file, sites=())
    assert (spec.version, spec.name) == (1, name)
    assert "name: " + name in dump(spec)


def test_what_says_nothing_has_its_default(read, by_schema, minimal):
    spec = read(minimal)
    assert read(b"\xef\xbb\xbf" + minimal.encode()) == spec, "a byte order mark"
    nothing = (
        "resources:\nlr_scheduler:\nslurm: {partition: , options: {qos: }}\n"
        "launch: {args: null}\ncluster: ~\nenvironment: {variables: {A: }}\n"
    )
    assert read(minimal + nothing) == spec
    assert by_schema(minimal + nothing)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), ("3.0e-4", 3e-4), ("1e5", 1e5), (".5", 0.5), ("-12", -12), ("0x1f", 31),
        ("0o17", 15), ("017", 17), ("-.inf", float("-inf")), ("true", True), ("False", False),
        ("yes", "yes"), ("no", "no"), ("1:30:00", "1:30:00"), ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"), ("'3e-4'", "3e-4"), ('"true"', "true"), ("!!str text", "text"),
        ("null", None), ("[1, a, {b: 2.5}]", [1, "a", {"b": 2.5}]),
        ("{0: a, '0x1': b, true: c, ~: d}", {0: "a", "0x1": "b", True: "c", None: "d"}),
    ],
)  # fmt: skip
def test_kwargs_have_the_types_of_yaml_1_2(read, minimal, text, value):
    spec = read(minimal + f"optimizer: {{factory: 'torch.optim:SGD', kwargs: {{x: {text}}}}}")
    read_value = spec.optimizer.kwargs["x"]
    assert (read_value, type(read_value), str(read_value)) == (value, type(value), str(value))


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("script: {file: train.py}", True),
        ("script: {file: train.py}\ndata: {workers: 2}\nloss: {weight: sum}", True),
        ("script: {file: train.py}\nmodel: {weights: w}\ndata: script", True),
        ("script: null", False),
        ("model: torch.nn:Linear\nloss: model\ndata: {workers: 2}", False),
        ("model: torch.nn:Linear\nloss: model\ndata: {factory: 'a:b'}", True),
        ("model: torch.nn:Linear\nloss: model", False),
    ],
)
def test_a_script_makes_the_parts_that_a_job_needs_otherwise(spec_file, by_schema, text, is_valid):
    text = f"version: 1\ntraining: {{steps: 1, batch_size: 8}}\n{text}\n"
    assert by_schema(text) == is_valid
    read = spec_file(text)
    for name in ("train.py", "w"):
        Path(name).write_text("")
    with nullcontext() if is_valid else pytest.raises(SpecError):
        read.spec()
