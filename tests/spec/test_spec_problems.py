"""Every kind of wrong spec, with the whole message; and files that are no spec at all."""

# ruff: noqa: E501 (a message is one line)

import re
import sys
from pathlib import Path

import pytest

from pipectl.errors import SpecError, UsageError
from pipectl.spec import load

WRONG_SPECS = Path(__file__).with_name("wrong_specs.txt")
"""Blocks of lines: what is added to the minimal spec (``~``: in place of the line of that key,
or without it; ``--set``: as an override; ``--site``: in a site file), and the problems, after
``=>``."""
BY_SCHEMA = re.compile(
    "unknown key|: missing|names no"
    "|: must be (a mapping|a list|text|auto|true|a whole number of at least)"
)
"""What a schema can tell, but within the grid and the points of a sweep."""
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
)


CODE = {
    "mine.py": """
from torch import nn
from parts import *

class Net(nn.Module):
    def __init__(self, width, depth=2, *, dropout=0.0): ...

class Inherited(Net): ...

def samples(count, **more): ...

class Sgd:
    def __init__(self, params, lr): ...
""",
    "parts.py": "from inner import Part as Piece\n",
    "inner.py": "class Part:\n    def __init__(self, size): ...\n",
}
"""The user's files beside the wrong specs."""


@pytest.fixture
def problems(spec_file, tmp_path):
    """What is wrong with a text, names and arguments in user code and points of a sweep included;
    of overrides that are none, with the hint."""
    for name, code in CODE.items():
        Path(name).write_text(code)

    def check(text, *overrides, site=""):
        try:
            file = spec_file(text, *overrides, user=site)
            file.points(file.spec(check_names=True))
        except SpecError as error:
            return str(error.message).replace(str(tmp_path), "/home/me").split("\n")
        except UsageError as error:
            return [f"{error.message} ({error.hint})"]
        return []

    return check


def test_the_problems_of_wrong_specs(problems, by_schema, minimal, snapshot):
    """The schema refuses the same, as far as an editor can tell."""
    blocks = []
    for block in WRONG_SPECS.read_text("utf-8").rstrip("\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith("=> ")]
        text, overrides, site = minimal, [], ""
        for line in lines:
            name, _, rest = line.partition(" ")
            if name == "~":
                key = rest.partition(":")[0]
                line = rest if ":" in rest else ""
                text = re.sub(rf"^{key}:.*", lambda _, line=line: line, text, flags=re.MULTILINE)
            elif name == "--set":
                overrides.append(rest)
            elif name == "--site":
                site += f"{rest}\n"
            else:
                text += f"{line}\n"
        found = problems(text, *overrides, site=site)
        assert found, block
        if not (overrides or site or "grid:" in text) and BY_SCHEMA.search(str(found)):
            assert not by_schema(text), block
        blocks.append("\n".join([*lines, *(f"=> {each}" for each in found)]))
    snapshot(WRONG_SPECS, "\n\n".join(blocks) + "\n")


HOW = " (write --set KEY=VALUE, such as --set pipeline.stages=4)"


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        ("pipeline:\n\tstages: 2", None, "job.yaml:8:1: not valid YAML: a tab cannot indent or start a value; use spaces"),
        ("output: {directory: a\x01}", None, "job.yaml:7:22: contains the unprintable character U+0001; remove it"),
        ("sweep: {points: [{? a" + ".a" * 5000 + " : 1}]}", None, f"job.yaml:7:10025: sweep.points[0].a{'.a' * 48}...: must be a key such as training.seed"),
        ("", "name=\x1b", "--set name: contains the unprintable character U+001B; remove it (quote the value as YAML does)"),
        ("", "\x1b", "--set \\x1b: there is no '='" + HOW),
        ("", "a" + ".a" * 5000 + "=1", f"--set a{'.a' * 48}...: there is no such key{HOW}"),
    ],
    ids=range(6),
)  # fmt: skip
def test_messages_are_printable_and_short(problems, minimal, text, override, message):
    assert problems(minimal + text, *filter(None, [override])) == [message]


@pytest.mark.parametrize(
    "change",
    [
        "model: {factory: ./mine.py:Net, kwargs: {width: 1, dropout: 1}}",
        "model: {factory: ./mine.py:Inherited, kwargs: {anything: 1}}",
        "model: {factory: ./mine.py:samples, kwargs: {count: 1, anything: 1}}",
        "model: {factory: ./mine.py:Piece, kwargs: {size: 1}}",
        # A sweep may give an argument that the job leaves out.
        "model: ./mine.py:Net\nsweep: {grid: {model.kwargs.width: [1, 2]}}",
    ],
)
def test_arguments_are_followed_through_imports_as_far_as_they_can_be_read(
    problems, minimal, change
):
    assert problems(re.sub("^model:.*", change, minimal, flags=re.MULTILINE)) == []


def test_paths_in_kwargs_are_relative_to_the_file_if_they_begin_with_a_dot(read, minimal):
    values = "{a: ./x/../y, b: [../z], c: x, d: /e, f: .5}"
    text = re.sub("^model:.*", f"model: {{factory: a:b, kwargs: {values}}}", minimal, flags=re.M)
    here = Path.cwd()
    expected = {"a": f"{here}/y", "b": [f"{here.parent}/z"], "c": "x", "d": "/e", "f": 0.5}
    assert read(text).model.kwargs == expected


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
def test_what_is_no_spec(problems, content, message):
    assert problems(content) == [f"job.yaml{message}"]


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("gone.yaml", "no such file", "write a starter spec with: pipectl init"),
        (".", "a directory, not a file", None),
        ("x" * 300, "cannot be read: File name too long", None),
        ("/dev/zero", "larger than 1 MiB, too large for a job spec", None),
    ],
)
def test_files_that_cannot_be_read(tmp_path, monkeypatch, name, message, hint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        load(Path(name), sites=())
    assert caught.value.message == f"{name}: {message}"
    assert caught.value.hint == hint


def test_a_tracker_that_is_not_installed_is_a_fault_where_the_job_runs_with_this_python(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("pipectl.spec.checks.find_spec", lambda _: None)
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: json:dumps\nloss: model\ndata: json:dumps\ntraining: {steps: 1, batch_size: 1}\n"
        "tracking: {wandb: {}}\nsite_defaults: false\n"
    )
    with pytest.raises(SpecError, match="wandb is not installed; pip install wandb"):
        load(path, check_names=True)
    elsewhere = ["environment.modules=[ml]"]
    load(path, elsewhere, check_names=True)
    (tmp_path / "wandb.py").write_text("")
    load(path, check_names=True)


NET = """
import os.path, torch.nn as nn
from typing import TYPE_CHECKING
import blocks
if TYPE_CHECKING:
    import lacking_types
try:
    import lacking_choice
except ImportError:
    lacking_choice = None
def build():
    import lacking_later
"""
"""User code in which nothing is certain to fail."""


@pytest.mark.parametrize("factory", ["./net.py:build", "net:build"])
def test_a_module_that_user_code_imports_and_python_lacks_is_a_fault_before_anything_runs(
    tmp_path, factory
):
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: {factory}\nloss: model\ndata: {factory}\ntraining: {{steps: 1, batch_size: 1}}\n"
        "site_defaults: false\n"
    )
    (tmp_path / "net.py").write_text(NET)
    blocks = tmp_path / "blocks.py"
    blocks.write_text("raise SystemExit\n")
    load(path, check_names=True)
    blocks.write_text("from .gone import x\nclass A:\n    from lacking_part.inner import x\n")
    with pytest.raises(SpecError) as caught:
        load(path, check_names=True)
    fault = f"model.factory: blocks.py:3 imports lacking_part, which {sys.executable} does not have"
    assert str(caught.value).count("lacking") == 2  # the fault and its hint, once for both keys
    assert fault in str(caught.value)
    assert "pip install lacking_part" in str(caught.value)
    load(path)
    for elsewhere in (
        "environment.modules=[ml]",
        "environment.setup=[. venv/bin/activate]",
        "environment.container={image: docker://ml}",
        "environment.variables={PYTHONPATH: lib}",
    ):
        load(path, [elsewhere], check_names=True)
    (tmp_path / "net.py").write_text(f"import sys\nsys.path.insert(0, 'lib')\n{NET}")
    load(path, check_names=True)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "lacking_part").mkdir()
    load(path, check_names=True)
