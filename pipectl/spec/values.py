"""Values of a spec that are given in Python: data, paths, and the user's functions and classes."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipectl.errors import Problem, SpecError
from pipectl.files import escape_path
from pipectl.libraries import is_library
from pipectl.spec.document import IN_PYTHON, MAX_DEPTH, KeyPath, escape, path_text, to_yaml

_TO_A_FILE = (
    "write it into a file, in a notebook by a cell that begins with %%writefile net.py, and name "
    'it: "net:{}"'
)


def override_texts(values: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """Yield each value as ``a.b=YAML``; see :class:`pipectl.spec.SpecFile`.

    Args:
        values: by dotted key. Functions and classes become references to them, paths their text.
        directory: that paths are relative to.

    Raises:
        SpecError: YAML has no such value, or ranks could not import a function or class.
    """
    for key, value in values.items():
        path = tuple(str(key).split("."))
        yield f"{key}={to_yaml(_plain(value, path, directory))}"


def _plain(value: Any, path: KeyPath, directory: Path) -> Any:
    """Plain data; ``path`` is that of the value."""
    if len(path) > MAX_DEPTH:
        raise _fault(path[:2], f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        return {
            _key(key, path): _plain(item, (*path, str(key)), directory)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple | range):
        return [_plain(item, (*path, index), directory) for index, item in enumerate(value)]
    if callable(value) and hasattr(value, "__qualname__"):
        return _reference(value, path)
    if hasattr(value, "tolist"):  # an array or number of numpy, or a tensor
        return _plain(value.tolist(), path, directory)
    if isinstance(value, os.PathLike):
        text = os.fsdecode(value)
        return text if text[:1] in ("~", "$") else escape_path(str(directory / text))
    return _scalar(value, path)


def _scalar(value: Any, path: KeyPath) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):  # of an enumeration, too
        return int(value)
    if isinstance(value, str):  # or what is derived from it, as the members of many enumerations
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    raise _fault(path, f"a spec has numbers, texts, lists and mappings, not {_kind(value)}")


def _key(key: Any, path: KeyPath) -> Any:
    if isinstance(key, str | int | float | bool) and not (
        isinstance(key, float) and math.isnan(key)
    ):
        return _scalar(key, path)
    raise _fault(path, f"a key must be a text or a number, not {_kind(key)}")


def _reference(value: Any, path: KeyPath) -> str:
    """``module:name`` of a function or class, or ``/path/file.py:name`` if it is in a file that no
    package contains: ranks do not search the directories that this process does."""
    module_name, name = getattr(value, "__module__", None) or "", value.__qualname__
    if "<" in name or not all(part.isidentifier() for part in name.split(".")):
        raise _fault(
            path,
            f"{name} is defined within a function, where ranks cannot import it",
            _TO_A_FILE.format(getattr(value, "__name__", "build").strip("<>") or "build"),
        )
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if module_name == "__main__":
        where = "the notebook or shell" if file is None else f"the script {Path(file).name}"
        raise _fault(
            path,
            f"{name} is defined in {where} itself, which ranks would run anew to import it",
            _TO_A_FILE.format(name),
        )
    top = module_name.partition(".")[0]
    if file is None or is_library(file) or top != module_name or not file.endswith(".py"):
        return f"{module_name}:{name}"
    if Path(file).name == "__init__.py":
        return f"{module_name}:{name}"
    return f"{escape_path(str(Path(file).absolute()))}:{name}"


def _kind(value: Any) -> str:
    kind = type(value)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"an object of type {escape(name)}"


def _fault(path: KeyPath, message: str, hint: str | None = None) -> SpecError:
    return SpecError([Problem(path_text(path) or IN_PYTHON, 0, 0, message)], hint=hint)
