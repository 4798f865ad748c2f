"""Importing and calling user code: what works, and the whole text of every error."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pipectl.capture.factories import bind, call, find
from pipectl.errors import CaptureError
from pipectl.spec.references import parse


def written(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


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
    written(tmp_path / "the_neighbour_module.py", "def build(a, b): return a + b\n")
    written(tmp_path / "own.py", text)
    assert found(factory, tmp_path)(2, 3) == 5
    sys.modules.pop("the_neighbour_module", None)


def test_a_file_is_one_module_by_its_path_and_run_again_if_it_failed(tmp_path: Path) -> None:
    for folder, text in (("a", "def build(): return 1"), ("b", "1 / 0")):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder / "model.py", text)
    assert found("./a/model.py:build", tmp_path) is found("./a/model.py:build", tmp_path)
    message("./b/model.py:build", tmp_path)
    written(tmp_path / "b" / "model.py", "def build(): return 2\n# mended\n")
    assert found("./a/model.py:build", tmp_path)() == 1
    assert found("./b/model.py:build", tmp_path)() == 2


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
    ],
)
def test_what_is_wrong_with_a_name_is_said(
    text: str, name: str, expected: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "own.py", text)
    assert message(f"./own.py:{name}", tmp_path) == f"{path}:{name}: {expected.format(path=path)}"


def test_files_and_modules_that_are_missing_are_named(tmp_path: Path) -> None:
    assert message("./absent.py:build", tmp_path) == f"{tmp_path}/absent.py:build: no such file"
    assert message("no_such_package.models:build", Path()) == (
        "no_such_package.models:build: cannot be imported: ModuleNotFoundError: "
        "No module named 'no_such_package'"
    )


def test_a_raising_factory_names_the_users_deepest_line(tmp_path: Path) -> None:
    text = "import json\ndef build(text):\n    return parse(text)\n"
    path = written(tmp_path / "deep.py", text + "def parse(text):\n    return json.loads(text)\n")
    build = found("./deep.py:build", tmp_path)
    name = "model.factory: ./deep.py:build"
    with pytest.raises(CaptureError) as raised:
        call(build, name, text="{")
    assert raised.value.message.startswith(f"{name}: raised JSONDecodeError: ")
    assert raised.value.message.endswith(f"(at {path}:5)")
    assert raised.value.cure is not None
    assert raised.value.cure.startswith("call ./deep.py:build in a Python shell with the kwargs")
    with pytest.raises(CaptureError) as raised:
        call(build, name, txet="{")
    assert raised.value.message == (
        f"{name}: raised TypeError: build() got an unexpected keyword argument 'txet'"
    )


def test_bind_constructs_classes_and_binds_functions() -> None:
    class Loss:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    assert bind(Loss, "loss", {"scale": 2.0}).scale == 2.0
    assert bind(max, "loss", {"default": 4})([]) == 4
    assert bind(max, "loss", {}) is max


def test_arguments_of_a_factory_may_have_any_name() -> None:
    given = {"function": "gelu", "factory": 3}
    assert call(dict, "models.py:dict", **given) == given
