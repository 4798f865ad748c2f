"""What a valid spec is read as, and where each of its values comes from."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipectl.spec import (
    JobSpec,
    Origin,
    SpecFile,
    dump,
    load,
    profile_key,
)

HERE = Path(__file__).parent


@pytest.fixture
def origins(tmp_path, monkeypatch, minimal):
    """Load the minimal spec with a text after it; where its values are written, by dotted key."""
    monkeypatch.chdir(tmp_path)

    def by_key(added, *overrides, sites=()):
        Path("job.yaml").write_text(minimal + added, encoding="utf-8")
        files = [Path(f"site{number}.yaml") for number in range(len(sites))]
        for file, text in zip(files, sites, strict=True):
            file.write_text(text, encoding="utf-8")
        read = SpecFile.read(Path("job.yaml"), overrides, files)
        every = read.origins(read.spec())
        return {".".join(map(str, origin.path)): origin for origin in every}

    return by_key


def written(origin: Origin) -> str:
    place = origin.place
    return "default" if place is None else f"{place.file}:{place.line}"


def test_a_job_that_says_everything(tmp_path, snapshot):
    """``full.yaml``, and as what it is read, with all defaults."""
    (tmp_path / "models").mkdir()
    for name in ("gpt.py", "text.py"):
        (tmp_path / "models" / name).touch()
    (tmp_path / "job.yaml").write_bytes((HERE / "full.yaml").read_bytes())
    spec = load(tmp_path / "job.yaml", sites=())
    snapshot(HERE / "full_as_read.yaml", dump(spec).replace(str(tmp_path), "/home/me"))
    assert spec.resources.ranks == 4


@pytest.mark.parametrize(
    "text",
    [
        "slurm: {options: {gres: gpu:2}}\nresources: {gpus_per_node: 2}",
        "slurm: {options: {gres: gpu:2}}\nresources: {gpus_per_node: 0}",
        "slurm: {options: {gpus: 6, gpus-per-socket: 1}}\nresources: {nodes: 3, gpus_per_node: 2}",
        "slurm: {options: {gpus-per-task: 1}}\nresources: {tasks_per_node: 2, gpus_per_node: 2}",
        "pbs: {select: naccelerators=2}\nresources: {nodes: 2, gpus_per_node: 2}",
        "slurm: {options: {gres: 'gpu:0,nvme:1', gpus: 0, gpus-per-node: false}}",
        "pbs: {select: 'gpu_model=none:ngpus=0', options: {h: true}}",
    ],
)
def test_options_may_ask_for_gpus_if_resources_say_how_many(read, minimal, text):
    assert read(minimal + text).resources.gpus_per_node in (0, 2)


@pytest.mark.parametrize(
    ("file", "name"),
    [("gpt.yaml", "gpt"), ("my job (2).yaml", "my-job--2"), ("-.yaml", "job"), ("é.v2.yaml", "v2")],
)
def test_the_name_is_by_default_that_of_the_file(tmp_path, minimal, file, name):
    (tmp_path / file).write_text("".join(minimal.splitlines(keepends=True)[2:]))
    spec = load(tmp_path / file, sites=())
    assert (spec.version, spec.name) == (1, name)
    assert "name: " + name in dump(spec)


def test_which_steps_are_recorded(read, minimal):
    def steps(text, count):
        trace = read(minimal + text).trace
        return [step for step in range(1, count + 1) if trace.includes(step, count)]

    assert steps("", 12) == [10]
    assert steps("", 4) == [4]
    assert steps("trace: {steps: []}", 12) == []
    assert steps("trace: {steps: [2, 30], every: 5}", 12) == [2, 5, 10, 12]
    assert steps("trace: {every: 1}", 3) == [1, 2, 3]


def test_null_and_empty_keys_have_their_defaults(read, minimal):
    spec = read(minimal + "resources:\nslurm: {partition: }\nlaunch: {args: null}\ncluster: ~\n")
    assert spec == read(minimal)


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
    ("text", "section", "key", "value"),
    [
        ("resources: {walltime: 1:30:00}", "resources", "walltime", 5400),
        ("resources: {walltime: 90}", "resources", "walltime", 5400),
        ("resources: {walltime: 90s}", "resources", "walltime", 90),
        ("resources: {walltime: '00:05:00'}", "resources", "walltime", 300),
        ("checkpoint: {every: 1e3}", "checkpoint", "every", 1000),
        ("slurm: &site {account: physics}\npbs: *site", "pbs", "account", "physics"),
    ],
)
def test_spellings_of_a_value(read, minimal, text, section, key, value):
    assert getattr(getattr(read(minimal + text), section), key) == value


def test_optimizer_groups_keep_the_types_of_their_options(read, minimal):
    groups = "[{match: '*.bias', weight_decay: 0, betas: [0.9, 9.9e-1]}, {match: 1.5, lr: 1e-4}]"
    spec = read(f"{minimal}optimizer: {{groups: {groups}}}\n")
    first, second = spec.optimizer.groups
    assert spec.optimizer.factory == "torch.optim:AdamW"
    assert (first.match, first.options) == ("*.bias", {"weight_decay": 0, "betas": [0.9, 0.99]})
    assert (second.match, second.options) == ("1.5", {"lr": 1e-4})
    assert read(dump(spec)).optimizer == spec.optimizer
    assert profile_key(spec) != profile_key(read(minimal))


def test_a_byte_order_mark_is_no_part_of_the_spec(read, minimal):
    assert read(b"\xef\xbb\xbf" + minimal.encode()).name == "demo"


def test_lower_layers_do_not_import_pydantic():
    code = "import sys, pipectl.errors, pipectl.plan; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_origin_of_a_value_is_the_layer_that_wins(origins):
    by_key = origins(
        "resources: {nodes: 2}\nslurm:\n  account: mine\ncheckpoint: {keep: null}\n"
        "optimizer:\n  kwargs:\n    lr: 0.1\n    decay: null\n"
        "lr_scheduler: torch.optim.lr_scheduler:ConstantLR\n",
        *("resources.tasks_per_node=4", "optimizer.kwargs.b=1", "slurm.options={hold: true}"),
        sites=("slurm: {partition: small, options: {qos: low}}\n", "\nslurm: {partition: large}\n"),
    )
    places = {
        "training.steps": "job.yaml:6",
        "resources.nodes": "job.yaml:7",
        "slurm.account": "job.yaml:9",
        "slurm.options.qos": "site0.yaml:1",
        "slurm.partition": "site1.yaml:2",
        "resources.tasks_per_node": "--set resources.tasks_per_node:0",
        "resources.walltime": "default",
        "checkpoint.keep": "default",
        "model.kwargs.in_features": "job.yaml:3",
        "optimizer.kwargs.lr": "job.yaml:13",
        "optimizer.kwargs.decay": "job.yaml:14",
        "optimizer.kwargs.b": "--set optimizer.kwargs.b:0",
        "optimizer.factory": "default",
        "lr_scheduler.factory": "job.yaml:15",
        "lr_scheduler.kwargs": "default",
    }
    assert {key: written(by_key[key]) for key in places} == places
    assert by_key["slurm.partition"].value == "large"
    assert by_key["resources.walltime"].value == "01:00:00"
    assert by_key["checkpoint.keep"].value == 3
    tops = list(dict.fromkeys(str(origin.path[0]) for origin in by_key.values()))
    assert tops == list(JobSpec.model_fields)


def test_origins_show_sizes_as_people_write_them(origins):
    by_key = origins("pipeline: {memory_limit: 1.5GiB}\nresources: {memory_per_node: 8GB}\n")
    assert by_key["pipeline.memory_limit"].value == "1536MiB"
    assert by_key["resources.memory_per_node"].value == "7812500KiB"


def test_origins_show_what_is_dumped_but_no_environment_variable(origins):
    by_key = origins("environment: {variables: {KEY: s3cret}}\n")
    text = dump(load(Path("job.yaml"), sites=()))
    assert all(f"{origin.path[-1]}:" in text for origin in by_key.values())
    assert by_key["environment.variables.KEY"].value == "(not shown)"


def test_keys_of_earlier_versions_may_have_their_defaults(read, minimal):
    """As in the job files of runs that an earlier version has submitted."""
    old = "{qos: null, exclusive: false, omit: [], directives: []}"
    checkpoint = "checkpoint: {on_signal: USR1}"
    launch = "launch: {progress_core: false, check_messages: false}"
    text = f"{minimal}slurm: {old}\nresources: {{more: []}}\n{checkpoint}\n{launch}\n"
    text += "pipeline: {offload_directory: }\n"
    assert read(text.replace("steps: 10", "steps: 10, check_replicas: 100")) == read(minimal)
