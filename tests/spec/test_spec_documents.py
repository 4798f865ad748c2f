"""The JSON Schema and the reference are made from the models, and the checked-in copies agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipectl.spec import JobSpec, json_schema
from pipectl.spec.reader import read_text
from pipectl.spec.reference import REFERENCE, SCHEMA, reference_markdown, write
from pipectl.spec.structure import sections
from pipectl.spec.tree import to_values

CHECKOUT = Path(__file__).parents[2]
CURE = "run: python -m pipectl.spec.reference ."


def test_the_checked_in_reference_is_current() -> None:
    assert (CHECKOUT / REFERENCE).read_text() == reference_markdown(), CURE


def test_the_checked_in_schema_is_current() -> None:
    assert json.loads((CHECKOUT / SCHEMA).read_text()) == json_schema(), CURE


def test_both_are_written_into_a_checkout(tmp_path: Path) -> None:
    for file in (REFERENCE, SCHEMA):
        (tmp_path / file).parent.mkdir()
    write(tmp_path)
    assert (tmp_path / REFERENCE).read_text() == reference_markdown()
    assert json.loads((tmp_path / SCHEMA).read_text()) == json_schema()


def test_every_key_is_explained() -> None:
    text = reference_markdown()
    for model in sections(JobSpec):
        for name in model.model_fields:
            rows = re.findall(rf"^\| `{name}` \| (.+) \| (.*) \| (.*) \|$", text, re.MULTILINE)
            assert rows, f"{model.__name__}.{name} is not in the reference"
            assert all(meaning for _, _, meaning in rows), f"{name} has no meaning"


def test_every_link_has_a_heading() -> None:
    text = reference_markdown()
    headings = {
        line[3:].lower().replace(" ", "-") for line in text.splitlines() if line[:3] == "## "
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


def accepts(schema: Any, value: Any, root: dict[str, Any]) -> bool:
    """Whether a value satisfies a JSON Schema, for the keywords that the schema uses."""
    if "$ref" in schema and not accepts(root["$defs"][schema["$ref"].split("/")[-1]], value, root):
        return False
    if "anyOf" in schema and not any(accepts(item, value, root) for item in schema["anyOf"]):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "type" in schema and not _has_type(value, schema["type"]):
        return False
    return _in_range(schema, value) and _fits_structure(schema, value, root)


def _has_type(value: Any, names: str | list[str]) -> bool:
    found = {"null"} if value is None else {"boolean"} if isinstance(value, bool) else set()
    if isinstance(value, int | float) and not found:
        found = {"number"} | ({"integer"} if value == int(value) else set())
    found |= {name for name, kind in _TYPES.items() if isinstance(value, kind)}
    return bool(found & ({names} if isinstance(names, str) else set(names)))


_TYPES = {"string": str, "array": list, "object": dict}


def _in_range(schema: dict[str, Any], value: Any) -> bool:
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    least, above = schema.get("minimum", value), schema.get("exclusiveMinimum", value - 1)
    return bool(least <= value and above < value)


def _fits_structure(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    if isinstance(value, list):
        return all(accepts(schema.get("items", {}), item, root) for item in value)
    if not isinstance(value, dict):
        return True
    known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not all(name in value for name in schema.get("required", ())):
        return False
    for name, item in value.items():
        inner = known.get(name, other)
        if inner is False or (isinstance(inner, dict) and not accepts(inner, item, root)):
            return False
    return True


def by_schema(text: str) -> bool:
    tree = read_text(text, "job.yaml", [])
    assert tree is not None
    return accepts(json_schema(), to_values(tree), json_schema())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "resources: {walltime: 1:30:00, memory_per_node: 8GiB, nodes: 1e0}",
        "resources: {walltime: 90, memory_per_node: 1.5}",
        "pipeline: {memory_limit: 4294967296, stages: auto, warm_up: auto, schedule: auto}",
        "pipeline: {stages: 1, warm_up: [2], schedule: 1f1b, recompute: none, replicas: 1}",
        "resources:\nslurm:\nlr_scheduler:\nenvironment: {variables: {A: , B: 1, C: true}}",
        "slurm: {account: 1234, exclusive: true, directives: ['-x']}",
        "optimizer: torch.optim:SGD\nlr_scheduler: a.b:c",
        "evaluation: {data: a:b, metrics: {x: a:b, y: {factory: a:b, kwargs: {z: [1]}}, w: }}",
        "optimizer: {factory: a:b, kwargs: {1: {2: null}}}",
        "environment: {setup: ['', 'a', 3]}\nlaunch: {mpi: pmix, args: []}\nsite_defaults: false",
    ],
)
def test_the_schema_accepts_what_the_loader_accepts(read, minimal: str, text: str) -> None:
    read(minimal + text)
    assert by_schema(minimal + text)


@pytest.mark.parametrize(
    "text",
    [
        "nam: x",
        "resources: {gpu_per_node: 1}",
        "resources: {nodes: 0}",
        "resources: {nodes: two}",
        "resources: 5",
        "pipeline: {schedule: gpip}",
        "pipeline: {warm_up: [0]}",
        "slurm: {exclusive: yes}",
        "launch: {args: x}",
        "optimizer: AdamW",
        "lr_scheduler: {kwargs: {}}",
        "environment: {modules: [null]}",
        "environment: {container: x}",
        "evaluation: {every: 1}",
        "slurm: {directives: [foo]}",
    ],
)
def test_the_schema_refuses_what_an_editor_can_tell(added, minimal: str, text: str) -> None:
    added(text)
    assert not by_schema(minimal + text)
