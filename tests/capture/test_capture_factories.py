"""Importing and calling user code: what works, and the whole text of every error."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from pipectl.capture.factories import bind, call, find
from pipectl.errors import CaptureError


def written(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


def message(factory: str, base: Path) -> str:
    with pytest.raises(CaptureError) as raised:
        find(factory, base)
    assert raised.value.cure
    return raised.value.message


def test_finds_a_function_in_a_file_beside_the_spec(tmp_path: Path) -> None:
    written(tmp_path / "sum.py", "def build(a, b=1):\n    return a + b\n")
    assert find("./sum.py:build", tmp_path)(2, b=3) == 5


def test_finds_a_class_in_an_importable_module() -> None:
    assert find("torch.nn:Linear", Path()).__name__ == "Linear"


def test_finds_an_attribute_of_an_attribute(tmp_path: Path) -> None:
    written(
        tmp_path / "nested.py",
        """
        class Models:
            @staticmethod
            def small():
                return 7
        """,
    )
    assert find("./nested.py:Models.small", tmp_path)() == 7


def test_a_file_may_import_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path / "the_neighbour_module.py", "WIDTH = 12\n")
    written(tmp_path / "uses.py", "from the_neighbour_module import WIDTH\ndef f(): return WIDTH\n")
    assert find("./uses.py:f", tmp_path)() == 12


def test_a_file_is_run_once_however_often_it_is_named(tmp_path: Path) -> None:
    written(tmp_path / "once.py", "class A: pass\nclass B: pass\n")
    assert find("./once.py:A", tmp_path) is find("./once.py:A", tmp_path)


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder / "model.py", f"def build(): return {value}\n")
    assert find("./a/model.py:build", tmp_path)() == 1
    assert find("./b/model.py:build", tmp_path)() == 2


def test_missing_file(tmp_path: Path) -> None:
    found = message("./absent.py:build", tmp_path)
    assert found == f"./absent.py:build: no such file: {tmp_path / 'absent.py'}"


def test_missing_module() -> None:
    assert message("no_such_package.models:build", Path()) == (
        "no_such_package.models:build: cannot be imported: ModuleNotFoundError: "
        "No module named 'no_such_package'"
    )


def test_missing_name_with_a_near_one(tmp_path: Path) -> None:
    written(tmp_path / "near.py", "def build(): ...\n")
    assert message("./near.py:biuld", tmp_path) == (
        "./near.py:biuld: ./near.py has no 'biuld'; did you mean 'build'?"
    )


def test_missing_name_without_a_near_one(tmp_path: Path) -> None:
    written(tmp_path / "far.py", "def build(): ...\n")
    assert message("./far.py:xyzzy", tmp_path) == "./far.py:xyzzy: ./far.py has no 'xyzzy'"


def test_a_name_that_is_not_callable(tmp_path: Path) -> None:
    written(tmp_path / "number.py", "LIMIT = 3\n")
    assert message("./number.py:LIMIT", tmp_path) == (
        "./number.py:LIMIT: is a int, not a function or class"
    )


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    path = written(tmp_path / "broken.py", "def build():\n    return (\n")
    found = message("./broken.py:build", tmp_path)
    assert found.startswith("./broken.py:build: cannot be imported: SyntaxError: '(' was never")
    assert found.endswith(f"(at {path}:2)")


def test_an_import_that_raises_names_the_users_line(tmp_path: Path) -> None:
    path = written(tmp_path / "raises.py", "import math\nmath.sqrt(-1)\n")
    assert message("./raises.py:build", tmp_path) == (
        f"./raises.py:build: cannot be imported: ValueError: math domain error (at {path}:2)"
    )


def test_a_script_that_exits_at_import_is_an_error_not_an_exit(tmp_path: Path) -> None:
    path = written(tmp_path / "script.py", "import sys\nsys.exit(2)\n")
    assert message("./script.py:build", tmp_path) == (
        f"./script.py:build: cannot be imported: SystemExit: 2 (at {path}:2)"
    )


def test_a_failed_import_is_tried_again(tmp_path: Path) -> None:
    path = written(tmp_path / "mended.py", "1 / 0\n")
    message("./mended.py:build", tmp_path)
    path.write_text("def build(): return 1\n# mended\n")
    assert find("./mended.py:build", tmp_path)() == 1


def test_a_raising_factory_names_the_users_deepest_line(tmp_path: Path) -> None:
    path = written(
        tmp_path / "deep.py",
        """\
        import json
        def build(text):
            return parse(text)
        def parse(text):
            return json.loads(text)
        """,
    )
    function = find("./deep.py:build", tmp_path)
    with pytest.raises(CaptureError) as raised:
        call(function, "./deep.py:build", text="{")
    assert raised.value.message.startswith("./deep.py:build: raised JSONDecodeError: ")
    assert raised.value.message.endswith(f"(at {path}:5)")
    assert raised.value.cure is not None
    assert raised.value.cure.startswith("call it in a Python shell")


def test_wrong_arguments_are_an_error_of_the_factory(tmp_path: Path) -> None:
    written(tmp_path / "few.py", "def build(width): return width\n")
    with pytest.raises(CaptureError) as raised:
        call(find("./few.py:build", tmp_path), "./few.py:build", widht=3)
    assert raised.value.message == (
        "./few.py:build: raised TypeError: build() got an unexpected keyword argument 'widht'"
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
