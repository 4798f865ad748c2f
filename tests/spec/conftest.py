"""A small valid job spec to spoil, and what the loader and the JSON Schema then say."""

import re
from math import nan
from pathlib import Path
from typing import Any

import pytest

from pipectl.spec import SpecFile
from pipectl.spec.document import read_text, resolve
from pipectl.spec.schema import json_schema

MINIMAL = """\
version: 1
name: demo
model: {factory: torch.nn:Linear, kwargs: {in_features: 4, out_features: 2}}
loss: {factory: torch.nn:MSELoss}
data: {factory: torch.utils.data:TensorDataset}
training: {steps: 10, batch_size: 8}
"""


@pytest.fixture
def minimal():
    """The required keys; further keys begin on line 7."""
    return MINIMAL


@pytest.fixture
def spec_file(tmp_path, monkeypatch):
    """A text as ``job.yaml`` of the current directory, above two site files."""
    monkeypatch.chdir(tmp_path)

    def read_file(text, *overrides, machine="", user=""):
        Path("job.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        sites = {Path("machine.yaml"): machine, Path("user.yaml"): user}
        for path, content in sites.items():
            path.write_text(content)
        return SpecFile.read(Path("job.yaml"), overrides, [*sites])

    return read_file


@pytest.fixture
def read(spec_file):
    """Load such a text."""
    return lambda text, *overrides: spec_file(text, *overrides).spec()


@pytest.fixture
def by_schema():
    """Whether a YAML text satisfies the JSON Schema."""
    schema = json_schema()

    def valid(text):
        return accepts(schema, resolve(read_text(text, "job.yaml", []).data), schema)

    return valid


def accepts(schema: Any, value: Any, root: dict[str, Any]) -> bool:
    """Whether a value satisfies a JSON Schema, for the keywords that the schema uses."""
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].split("/")[-1]], value, root)
    if not _accepts_branches(schema, value, root):
        return False
    if value not in schema.get("enum", [value]) or value not in [schema.get("const", value)]:
        return False
    names = schema.get("type", [])
    if names and not _types(value) & ({names} if isinstance(names, str) else set(names)):
        return False
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        return all(accepts(schema.get("items", {}), item, root) for item in value)
    if isinstance(value, dict):
        return _accepts_mapping(schema, value, root)
    if value is None or isinstance(value, bool):
        return True
    bounds = (value < schema.get("minimum", value), value <= schema.get("exclusiveMinimum", nan))
    return not any(bounds)


def _accepts_branches(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    if "if" in schema:
        branch = "then" if accepts(schema["if"], value, root) else "else"
        if not accepts(schema.get(branch, {}), value, root):
            return False
    return "anyOf" not in schema or any(accepts(item, value, root) for item in schema["anyOf"])


def _types(value: Any) -> set[str]:
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == value // 1 else {"number"}
    return {{str: "string", list: "array", dict: "object"}[type(value)]}


def _accepts_mapping(schema: dict[str, Any], value: dict[Any, Any], root: dict[str, Any]) -> bool:
    known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not all(name in value for name in schema.get("required", ())):
        return False
    inner = ((known.get(name, other), item) for name, item in value.items())
    return all(k is True or (k is not False and accepts(k, item, root)) for k, item in inner)
