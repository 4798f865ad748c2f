"""``--set key.key=value``."""

# ruff: noqa: E501 (a message is one line)

from __future__ import annotations

import pytest

from pipectl.errors import SpecError, UsageError


def test_values_are_read_like_those_of_the_file(read, minimal) -> None:
    spec = read(
        minimal,
        "resources.walltime=1:30:00",
        "resources.nodes=4",
        "pipeline.stages=3",
        "pipeline.memory_limit=2GiB",
        "optimizer.kwargs.lr=3e-4",
        "slurm.account=1234",
        "launch.args=[--label, '-v']",
        "environment.variables={A: 1, B: two}",
    )
    assert spec.resources.walltime == 5400
    assert (spec.resources.nodes, spec.pipeline.stages) == (4, 3)
    assert spec.pipeline.memory_limit_bytes == 2**31
    assert spec.optimizer.kwargs == {"lr": 3e-4}
    assert spec.slurm.account == "1234"
    assert spec.launch.args == ("--label", "-v")
    assert spec.environment.variables == {"A": "1", "B": "two"}


def test_the_last_one_wins(read, minimal) -> None:
    assert read(minimal, "training.steps=3", "training.steps=5").training.steps == 5


def test_just_the_named_key_is_replaced(read, minimal) -> None:
    spec = read(minimal, "model.kwargs.in_features=9", "training.steps=3")
    assert spec.model.kwargs == {"in_features": 9, "out_features": 2}
    assert (spec.training.steps, spec.training.batch_size) == (3, 8)
    assert read(minimal, "model.kwargs={}").model.kwargs == {}
    assert read(minimal, "model.factory=a.b:c").model.kwargs == spec.model.kwargs | {
        "in_features": 4
    }


def test_nothing_or_null_restores_the_default(read, minimal) -> None:
    text = minimal + "slurm: {partition: debug, account: a}\n"
    spec = read(text, "slurm.partition=", "slurm.account=null")
    assert (spec.slurm.partition, spec.slurm.account) == (None, None)


def test_a_wrong_value_in_the_file_may_be_overridden(read, minimal) -> None:
    assert read(minimal.replace("steps: 10", "steps: ten"), "training.steps=3").training.steps == 3


def test_keyword_arguments_join_a_factory_in_short_form(read, minimal) -> None:
    spec = read(minimal + "optimizer: torch.optim:SGD\n", "optimizer.kwargs.lr=0.1")
    assert spec.optimizer.factory == "torch.optim:SGD"
    assert spec.optimizer.kwargs == {"lr": 0.1}


SHORT = """\
{version: 1, name: demo, model: a:model, loss: a:loss, data: a:data, optimizer: a:optimizer,
 training: {steps: 10, batch_size: 8}, evaluation: {data: a:held_out, metrics: {m: a:metric}},
 callbacks: {c: a:callback}}
"""


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.groups=[{match: '*.bias', weight_decay: 0}]",
        "model.materialize=per_rank",
        "model.opaque=[router]",
        "loss.weight=a:weight",
        "data.workers=2",
        "data.drop_last=true",
        "data.shuffle=false",
        "evaluation.data.kwargs.count=5",
        "evaluation.metrics.m.kwargs.k=5",
        "callbacks.c.kwargs.project=p",
    ],
)
def test_every_key_joins_a_factory_in_short_form(read, override: str) -> None:
    before, after = read(SHORT), read(SHORT, override)
    assert set(before.factories()) <= set(after.factories())
    assert after != before


def test_text_where_no_factory_may_stand_is_replaced(read, minimal) -> None:
    spec = read(minimal + "callbacks: a:callback\n", "callbacks.c=a:callback")
    assert list(spec.callbacks) == ["c"]
    spec = read(minimal, "model.kwargs.in_features.kwargs=5")
    assert spec.model.kwargs["in_features"] == {"kwargs": 5}


def test_a_value_may_contain_an_equals_sign(read, minimal) -> None:
    spec = read(minimal, "slurm.directives=[--gres=gpu:1]", "pbs.select_extra=model=icelake")
    assert spec.slurm.directives == ("--gres=gpu:1",)
    assert spec.pbs.select_extra == "model=icelake"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pipeline.stage=2", "--set pipeline.stage: unknown key; did you mean 'stages'?"),
        ("pipelin.stages=2", "--set pipelin.stages: pipelin: unknown key; did you mean 'pipeline'?"),
        ("walltime=3", "--set walltime: unknown key; did you mean 'resources.walltime'?"),
        ("pipeline.stages=0", "--set pipeline.stages: must be at least 1, not 0"),
        ("pipeline={stages: 0}", "--set pipeline: pipeline.stages: must be at least 1, not 0"),
        ("launch.args=x", "--set launch.args: must be a list, not 'x'"),
        ("launch.args.0=x", "--set launch.args.0: launch.args: must be a list, not a mapping"),
        ("name.x=1", "--set name.x: name: must be a name, not a mapping"),
        ("training=", "--set training: missing"),
        ("training=3", "--set training: must be a mapping, not 3"),
        ("lr_scheduler.kwargs.T=1", "--set lr_scheduler.kwargs.T: lr_scheduler.factory: missing"),
        ("slurm={qos: a, qos: b}", "--set slurm: qos: given twice; first on line 1"),
        ('name="\\e"', "--set name: contains the unprintable character U+001B; remove it"),
        ("pipeline.micro_batches=9", "--set pipeline.micro_batches: a batch of 8 cannot be cut into 9; lower it or raise training.batch_size"),
        ("na\x1bme=3", "--set na\\x1bme: unknown key; did you mean 'name'?"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_named(complaints, minimal, override: str, message: str) -> None:
    assert complaints(minimal, override)[0] == message


def test_problems_of_file_and_overrides_are_told_together(complaints, minimal) -> None:
    assert complaints(minimal + "nam: x", "pipeline.stages=0", "training.steps=0") == [
        "--set pipeline.stages: must be at least 1, not 0",
        "--set training.steps: must be at least 1, not 0",
        "job.yaml:7:1: nam: unknown key; did you mean 'name'?",
    ]


@pytest.mark.parametrize(
    ("override", "message", "cure"),
    [
        ("pipeline.stages", "--set pipeline.stages: there is no '='", "write --set pipeline.stages=4"),
        ("=3", "--set =3: a key is missing before '='", "write --set pipeline.stages=4"),
        ("a..b=2", "--set a..b=2: a key is missing before '='", "write --set pipeline.stages=4"),
        ("launch.args=[", "--set launch.args: not valid YAML: it ends inside a bracket that is not closed", "quote the value as YAML does"),
        ("name=\x1b", "--set name: contains the unprintable character U+001B; remove it", "quote the value as YAML does"),
        ("\x1b", "--set \\x1b: there is no '='", "write --set pipeline.stages=4"),
    ],
)  # fmt: skip
def test_what_is_no_override(read, minimal, override: str, message: str, cure: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(minimal, override)
    assert (caught.value.message, caught.value.cure) == (message, cure)


def test_a_file_that_cannot_be_read_is_told_before_overrides(read) -> None:
    with pytest.raises(SpecError, match="empty"):
        read("", "no override")
