"""Every kind of wrong spec, with the whole message; and files that are no spec at all."""

# ruff: noqa: E501 (a message is one line)

import os
import re
from pathlib import Path

import pytest

from pipectl.errors import SpecError
from pipectl.spec import SpecFile, load

WRONG_SPECS = Path(__file__).with_name("wrong_specs.txt")
"""Blocks of lines: what is added to the minimal spec (``~``: in place of the line of that key;
``--set``: as an override), and the problems, after ``=>``."""
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
)


def test_the_problems_of_wrong_specs(read_points, minimal):
    blocks = []
    for block in WRONG_SPECS.read_text("utf-8").rstrip("\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith("=> ")]
        text, overrides = minimal, []
        for line in lines:
            name, _, rest = line.partition(" ")
            if name == "~":
                key = rest.partition(":")[0]
                text = re.sub(rf"^{key}:.*", lambda _, rest=rest: rest, text, flags=re.MULTILINE)
            elif name == "--set":
                overrides.append(rest)
            else:
                text += f"{line}\n"
        with pytest.raises(SpecError) as caught:
            read_points(text, *overrides)
        problems = str(caught.value.message).replace(str(Path.cwd()), "/home/me").split("\n")
        blocks.append("\n".join([*lines, *(f"=> {each}" for each in problems)]))
    snapshot = "\n\n".join(blocks) + "\n"
    if os.environ.get("PIPECTL_GOLDEN") == "write":
        WRONG_SPECS.write_text(snapshot, "utf-8")
    assert snapshot == WRONG_SPECS.read_text("utf-8"), "if that is intended: make golden"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipeline:\n\tstages: 2", "8:1: not valid YAML: a tab cannot indent or start a value; use spaces"),
        ("output: {directory: a\x01}", "7:22: contains the unprintable character U+0001; remove it"),
        ("sweep: {points: [{? a" + ".a" * 5000 + " : 1}]}", f"7:10025: sweep.points[0].a{'.a' * 48}...: must be a key such as training.seed"),
    ],
)  # fmt: skip
def test_messages_are_printable_and_short(read_points, minimal, text, message):
    with pytest.raises(SpecError) as caught:
        read_points(minimal + text)
    assert caught.value.message == f"job.yaml:{message}"


def test_missing_files_are_named_with_their_place(complaints, minimal, tmp_path):
    text = minimal.replace("torch.nn:Linear", "./gone.py:build") + (
        "cluster: gone.json\n"
        "evaluation: {data: ./gone.py:held_out, metrics: {m: ./gone.py:f}}\n"
        "optimizer: ../none/gone.py:f\n"
    )
    gone = tmp_path / "gone.py"
    assert complaints(text) == [
        f"job.yaml:3:18: model.factory: no such file: {gone}",
        f"job.yaml:7:10: cluster: no such file: {tmp_path / 'gone.json'}",
        f"job.yaml:8:20: evaluation.data.factory: no such file: {gone}",
        f"job.yaml:8:53: evaluation.metrics.m.factory: no such file: {gone}",
        f"job.yaml:9:12: optimizer.factory: no such file: {tmp_path.parent / 'none' / 'gone.py'}",
    ]


CODE = """
from torch import nn
from parts import *

class Net(nn.Module):
    def __init__(self, width, depth=2, *, dropout=0.0): ...

class Inherited(Net): ...

def samples(count, **more): ...
"""
"""The file of the user's code in the following tests."""


@pytest.fixture
def faults_of_code(tmp_path, monkeypatch):
    """The problems of a text of which names in user code are checked too."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    Path("parts.py").write_text("from inner import Part as Piece\n")
    Path("inner.py").write_text("class Part:\n    def __init__(self, size): ...\n")

    def check(text):
        Path("job.yaml").write_text(text)
        try:
            SpecFile.read(Path("job.yaml"), (), ()).spec(check_names=True)
        except SpecError as error:
            return [str(problem).partition(": ")[2] for problem in error.problems]
        return []

    return check


def test_wrong_names_and_arguments_are_listed_together_with_wrong_keys(faults_of_code):
    text = """
modle: 1
model: {factory: ./mine.py:Net, kwargs: {dept: 3}, size: 2}
loss: torch.nn:CrossEntropyLos
data: ./mine.py:sample
evaluation: {data: ./gone.py:held_out}
optimizer: torch.optim:Adamw
lr_scheduler: {factory: torch.optim.lr_scheduler:CosineAnnealingLR, kwargs: {Tmax: 4}}
training: {steps: 1, batch_size: 4}
"""
    faults = faults_of_code(text)
    here = Path.cwd()
    assert sorted(faults) == [
        f"data.factory: {here}/mine.py defines no 'sample'; did you mean 'samples'?",
        f"evaluation.data.factory: no such file: {here}/gone.py",
        "loss.factory: torch.nn defines no 'CrossEntropyLos'; did you mean 'CrossEntropyLoss'?",
        "lr_scheduler.factory: CosineAnnealingLR needs the argument 'T_max'; write it under kwargs",
        "lr_scheduler.kwargs.Tmax: CosineAnnealingLR takes no argument 'Tmax'; did you mean 'T_max'?",
        "model.factory: Net needs the argument 'width'; write it under kwargs",
        "model.kwargs.dept: Net takes no argument 'dept'; did you mean 'depth'?",
        "model.size: unknown key; known are factory, kwargs, materialize, opaque, weights",
        "modle: unknown key; did you mean 'model'?",
        "optimizer.factory: torch.optim defines no 'Adamw'; did you mean 'AdamW'?",
    ]


@pytest.mark.parametrize(
    ("model", "faults"),
    [
        ("{factory: ./mine.py:Net, kwargs: {width: 1, dropout: 1}}", []),
        ("{factory: ./mine.py:Inherited, kwargs: {anything: 1}}", []),
        ("{factory: ./mine.py:samples, kwargs: {count: 1, anything: 1}}", []),
        ("{factory: ./mine.py:Piece, kwargs: {size: 1}}", []),
        ("{factory: mine:Piece, kwargs: {size: 1, x: 1}}", ["model.kwargs.x: Piece takes no argument 'x'; it takes size"]),
        ("{factory: ./mine.py:Part}", ["model.factory: {}/mine.py defines no 'Part'"]),
        ("{factory: mine:Peace}", ["model.factory: {}/mine.py defines no 'Peace'; did you mean 'Piece'?"]),
    ],
)  # fmt: skip
def test_arguments_are_followed_through_imports_as_far_as_they_can_be_read(
    faults_of_code, minimal, model, faults
):
    text = re.sub("^model:.*", f"model: {model}", minimal, flags=re.MULTILINE)
    assert faults_of_code(text) == [each.replace("{}", str(Path.cwd())) for each in faults]


def test_arguments_that_pipectl_gives_itself_are_not_listed(faults_of_code, minimal):
    text = re.sub("^optimizer:.*\\n", "", minimal, flags=re.MULTILINE)
    optimizer = "{factory: torch.optim:AdamW, kwargs: {zz: 1}}"
    (fault,) = faults_of_code(f"{text}optimizer: {optimizer}\n")
    assert "AdamW takes no argument 'zz'; it takes lr, betas" in fault


def test_a_sweep_may_give_an_argument_that_the_job_leaves_out(faults_of_code, minimal):
    text = re.sub("^model:.*", "model: ./mine.py:Net", minimal, flags=re.MULTILINE)
    assert len(faults_of_code(text)) == 1
    assert faults_of_code(text + "sweep: {grid: {model.kwargs.width: [1, 2]}}\n") == []


def test_paths_in_kwargs_are_relative_to_the_file_if_they_begin_with_a_dot(read, minimal):
    values = "{a: ./x/../y, b: [../z], c: x, d: /e, f: .5}"
    text = re.sub("^model:.*", f"model: {{factory: a:b, kwargs: {values}}}", minimal, flags=re.M)
    here = Path.cwd()
    expected = {"a": f"{here}/y", "b": [f"{here.parent}/z"], "c": "x", "d": "/e", "f": 0.5}
    assert read(text).model.kwargs == expected


def test_all_required_keys_are_named(complaints):
    required = ("data", "loss", "model", "training")
    assert complaints("{}") == [f"job.yaml:1:1: {key}: missing" for key in required]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": the file is empty"),
        (b"# nothing but a comment\n", ": the file is empty"),
        (b"[a]", ": must be a mapping of keys to values"),
        (b"name: \xe4", ":1:7: not UTF-8 text (byte 0xe4)"),
        (b"\x7fELF\x00\x01", ": a binary file; a job spec is YAML text"),
        (b"a: " + b"x" * 2**20, ": larger than 1 MiB, too large for a job spec"),
        (b"[" * 1000, ":1:41: nested more than 40 levels deep"),
        (b"? " * 1000, ":1:81: nested more than 40 levels deep"),
        (BOMB.encode(), ":1:34: more than 20000 values, counting aliases where they are used"),
    ],
)  # fmt: skip
def test_what_is_no_spec(complaints, content, message):
    assert complaints(content) == [f"job.yaml{message}"]


@pytest.mark.parametrize(
    ("name", "message", "cure"),
    [
        ("gone.yaml", "no such file", "write a starter spec with: pipectl init"),
        (".", "a directory, not a file", None),
        ("x" * 300, "cannot be read: File name too long", None),
    ],
)
def test_files_that_cannot_be_read(tmp_path, monkeypatch, name, message, cure):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        load(Path(name), sites=())
    assert caught.value.message == f"{name}: {message}"
    assert caught.value.cure == cure


def test_an_endless_file_is_not_read_to_its_end():
    with pytest.raises(SpecError, match="larger than 1 MiB"):
        load(Path("/dev/zero"), sites=())


def test_large_mappings_of_unknown_keys_are_reported_quickly(complaints):
    assert len(complaints("\n".join(f"key{n}: {n}" for n in range(300)))) == 304
