"""Importing and calling user code beside the job, beside the spec or installed, and its errors."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipectl.capture import CapturedJob
from pipectl.capture.factories import bind, call, find
from pipectl.errors import CaptureError, SpecError
from pipectl.spec import SpecFile, dump, load, profile_key
from pipectl.spec.references import parse


def found(factory: str, base: Path) -> Any:
    return find(str(parse(factory, base)))


def message(factory: str, base: Path) -> str:
    with pytest.raises(CaptureError) as raised:
        found(factory, base)
    assert raised.value.cure
    return raised.value.message


@pytest.mark.parametrize(
    ("text", "factory"),
    [
        ("def build(a, b=1): return a + b", "./own.py:build"),
        ("class Models:\n    build = lambda a, b: a + b", "./own.py:Models.build"),
        ("from operator import add as build", "./own.py:build"),
        ("from the_neighbour_module import build", "./own.py:build"),
        ("", "operator:add"),
    ],
    ids=["function", "attribute of an attribute", "imported", "of a neighbour", "package"],
)
def test_a_name_in_a_file_beside_the_spec_or_in_a_package_is_found(
    text: str, factory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "the_neighbour_module.py").write_text("def build(a, b): return a + b\n")
    (tmp_path / "own.py").write_text(text)
    assert found(factory, tmp_path)(2, 3) == 5
    sys.modules.pop("the_neighbour_module", None)


def test_a_file_is_one_module_by_its_path_and_run_again_if_it_failed(tmp_path: Path) -> None:
    files = [tmp_path / folder / "model.py" for folder in "ab"]
    for file, text in zip(files, ("def build(): return 1", "1 / 0"), strict=True):
        file.parent.mkdir()
        file.write_text(text)
    first = found("./a/model.py:build", tmp_path)
    assert first is found("./a/model.py:build", tmp_path)
    message("./b/model.py:build", tmp_path)
    files[1].write_text("def build(): return 2\n# mended\n")
    assert (first(), found("./b/model.py:build", tmp_path)()) == (1, 2)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("def build(): ...", "biuld", "there is no 'biuld'; did you mean 'build'?"),
        ("def build(): ...", "xyzzy", "there is no 'xyzzy'"),
        ("LIMIT = 3", "LIMIT", "is a int, not a function or class"),
        (
            "import math\nmath.sqrt(-1)",
            "build",
            "cannot be imported: ValueError: math domain error (at {path}:2)",
        ),
        ("import sys\nsys.exit(2)", "build", "cannot be imported: SystemExit: 2 (at {path}:2)"),
        (
            "def build():\n    return (\n",
            "build",
            "cannot be imported: SyntaxError: '(' was never closed (own.py, line 2) (at {path}:2)",
        ),
        (None, "build", "no such file"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(
    text: str | None, name: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    if text is not None:
        path.write_text(text)
    assert message(f"./own.py:{name}", tmp_path) == f"{path}:{name}: {expected.format(path=path)}"


def test_a_raising_factory_names_the_users_deepest_line(tmp_path: Path) -> None:
    path, name = tmp_path / "deep.py", "model.factory: ./deep.py:build"
    path.write_text(
        "import json\ndef build(text):\n    return parse(text)\n"
        "def parse(text):\n    return json.loads(text)\n"
    )
    build = found("./deep.py:build", tmp_path)
    with pytest.raises(CaptureError) as raised:
        call(build, name, text="{")
    assert raised.value.message.startswith(f"{name}: raised JSONDecodeError: ")
    assert raised.value.message.endswith(f"(at {path}:5)")
    start = "call ./deep.py:build in a Python shell with the kwargs"
    assert str(raised.value.cure).startswith(start)
    with pytest.raises(CaptureError) as raised:
        call(build, name, txet="{")
    assert raised.value.message == (
        f"{name}: raised TypeError: build() got an unexpected keyword argument 'txet'"
    )


def test_classes_are_constructed_functions_bound_and_arguments_may_have_any_name() -> None:
    class Loss:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    assert bind(Loss, "loss", {"scale": 2.0}).scale == 2.0
    assert bind(max, "loss", {"default": 4})([]) == 4
    assert bind(max, "loss", {}) is max
    given = {"function": "gelu", "factory": 3}
    assert call(dict, "models.py:dict", **given) == given


# A package that is next to the job file: found from any directory, by commands and by ranks

JOB = """\
version: 1
name: tiny
model: {factory: "ownnet.net:Model"}
loss: {factory: "torch.nn:MSELoss"}
data: {factory: "ownnet.data:samples"}
training: {steps: 1, batch_size: 8}
site_defaults: false
"""
PACKAGE = {
    "__init__.py": "",
    "layers.py": "from torch import nn\nLayer = nn.Linear\n",
    "net.py": "from .layers import Layer\n\nclass Model(Layer):\n"
    "    def __init__(self):\n        super().__init__(4, 2)\n",
    "data.py": "import torch\nfrom torch.utils.data import TensorDataset\n\n"
    "def samples():\n    return TensorDataset(torch.zeros(16, 4), torch.zeros(16, 2))\n",
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job beside its package; neither is in the current directory."""
    package, elsewhere = tmp_path / "jobs" / "ownnet", tmp_path / "elsewhere"
    package.mkdir(parents=True)
    elsewhere.mkdir()
    for name, text in PACKAGE.items():
        (package / name).write_text(text)
    path = tmp_path / "jobs" / "job.yaml"
    path.write_text(JOB)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    for name in [name for name in sys.modules if name.partition(".")[0] == "ownnet"]:
        del sys.modules[name]


def test_ranks_find_it_by_the_job_of_their_run_directory_until_it_changes(
    job: Path, tmp_path: Path
) -> None:
    spec = load(job)
    assert type(CapturedJob(spec).model).__name__ == "Model"
    (tmp_path / "run.yaml").write_text(dump(spec))
    kept = load(tmp_path / "run.yaml")
    assert kept.model.factory == f"{job.parent}/ownnet.net:Model"
    assert type(CapturedJob(kept).model).__name__ == "Model"
    assert kept.model.reference == spec.model.reference
    before = profile_key(spec)
    assert profile_key(kept) == before
    with (job.parent / "ownnet" / "layers.py").open("a") as file:
        file.write("# changed\n")
    assert profile_key(load(job)) != before


def test_a_file_with_relative_imports_is_to_be_named_as_a_module(job: Path) -> None:
    with pytest.raises(Exception, match="attempted relative import") as caught:
        CapturedJob(load(job, ["model.factory=./ownnet/net.py:Model"]))
    assert "package.module:name" in str(getattr(caught.value, "cure", ""))


def test_check_says_which_module_cannot_be_found(job: Path) -> None:
    with pytest.raises(SpecError, match=r"model\.factory: there is no module ownnet\.nets in "):
        SpecFile.read(job, ["model.factory=ownnet.nets:Model"]).spec(check_names=True)


NAMES_AT_RUN_TIME = [
    "from os.path import *",
    "def __getattr__(name): ...",
    "globals()['build'] = 1",
    "try:\n    import quick as build\nexcept ImportError:\n    build = None",
    "if True:\n    def build(): ...",
    "def make():\n    global build\n    build = 1",
    "one, (build, two) = 1, (2, 3)",
]


def test_what_may_come_about_at_run_time_or_by_a_finder_of_an_editable_install_passes(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, None) if name == "editable" else None

    def check(name: str) -> None:
        SpecFile.read(job, [f"model.factory={name}"]).spec(check_names=True)

    for text in NAMES_AT_RUN_TIME:
        (job.parent / "own.py").write_text(text)
        check("./own.py:build")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    check("editable.net:Model")
    monkeypatch.setitem(sys.modules, "made_at_run_time", ModuleType("made_at_run_time"))
    check("made_at_run_time.net:Model")


def test_check_loads_neither_torch_nor_the_users_code(job: Path) -> None:
    with (job.parent / "ownnet" / "net.py").open("a") as file:
        file.write("raise SystemExit('imported')\n")
    code = (
        "import sys; from pipectl.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'ownnet' not in sys.modules; sys.exit(code)"
    )
    command: list[Any] = [sys.executable, "-c", code, "check", job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
