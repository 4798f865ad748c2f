"""The JSON Schema of the job spec: pydantic's, for editors, the reference and messages.

It accepts whatever the loader accepts. What a value must be is described from the schema alone.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from pipectl.errors import Problem
from pipectl.spec import code_sections, launch, models
from pipectl.spec.checks import fault_of_foreign_key
from pipectl.spec.document import (
    IN_PYTHON,
    KeyPath,
    Node,
    Plain,
    describe,
    parse_scalar,
    path_text,
    resolve,
)
from pipectl.spec.models import JobSpec
from pipectl.spec.places import factories_in
from pipectl.spec.types import SCALAR
from pipectl.units import did_you_mean, printable

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NUMBERS = ("int_type", "float_type", "bool_type")
_MAX_PLACES = 3
"""Maximum number of keys that a message offers."""
_OF_SCRIPT = ("model", "loss", "data")
"""Sections that a job needs if it has no script."""
_TYPES = {"object": "a mapping", "array": "a list"}

Schema = dict[str, Any]


class _Generator(GenerateJsonSchema):
    """Omits titles that only repeat names; allows null, for the default, in every section."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False

    def str_schema(self, schema: Any) -> Schema:
        """The schema of a text, which may be written without quotes."""
        return {**super().str_schema(schema), "type": SCALAR}

    def model_schema(self, schema: Any) -> Schema:
        """The schema of a section, with defaults as people write them."""
        section = super().model_schema(schema)
        section.pop("title", None)
        model = schema["cls"]
        defaults = model.model_construct().model_dump()
        for name, info in model.model_fields.items():
            field = section["properties"][name]
            field.pop("description", None)
            field.pop("default", None)
            if isinstance(values := field.get("additionalProperties"), dict):
                field["additionalProperties"] = _or_null(values)
            if not info.is_required():
                field = _or_null(field)
                default = defaults[name]
                if isinstance(default, int | float) or (default and isinstance(default, str)):
                    field["default"] = default
                elif default and isinstance(default, tuple):
                    field["default"] = list(default)
            described = (_descriptions().get(base.__name__, {}) for base in model.__mro__)
            if text := next((each[name] for each in described if name in each), ""):
                field = {"description": " ".join(text.split()), **field}
            section["properties"][name] = field
        return section


@cache
def _descriptions() -> dict[str, dict[str, str]]:
    """The docstrings of fields by class; pydantic would parse them at every start."""
    files = [inspect.getfile(each) for each in (models, code_sections, launch)]
    trees = [ast.parse(Path(file).read_text("utf-8")) for file in files]
    return {
        section.name: {
            field.target.id: str(text.value.value)
            for field, text in pairwise(section.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }
        for tree in trees
        for section in tree.body
        if isinstance(section, ast.ClassDef)
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    choices = schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
    null = {"type": "null"}
    return {"anyOf": choices if null in choices else [*choices, null]}


@cache
def json_schema() -> Schema:
    """The schema, shared by all callers: do not modify it."""
    schema = JobSpec.model_json_schema(schema_generator=_Generator)
    return {"$schema": _DIALECT, "title": "pipectl job spec", **_with_script(schema)}


def _with_script(schema: Schema) -> Schema:
    """The same for a job without a script; the parts that a script makes may be left out."""
    parts = {}
    for name in ("Model", "Loss", "Data", "Optimizer", "HeldOut", "Part"):
        of_part = schema["$defs"][name]["anyOf"]
        (section,) = (item for item in of_part if "properties" in item)
        (word,) = (item for item in of_part if item.get("type") == "string")
        factory = next(alternatives(section["properties"]["factory"]))
        word.update({key: factory[key] for key in ("title", "pattern")})
        part = name.lower()
        if part not in _OF_SCRIPT:
            continue
        section["required"].remove("factory")
        if not section["required"]:
            del section["required"]
        parts[part] = {"if": {"type": "object"}, "then": {"required": ["factory"]}}
    return {
        **schema,
        "required": [name for name in schema["required"] if name not in parts],
        "if": {"required": ["script"], "properties": {"script": {"type": "object"}}},
        "else": {"required": [*parts], "properties": parts},
    }


def required_keys(schema: Schema) -> dict[str, bool]:
    """The keys that a mapping must have, and whether also in a job with a script."""
    section = next((item for item in alternatives(schema) if "properties" in item), {})
    more = section.get("else", {}).get("required", ())
    return {**dict.fromkeys(more, False), **dict.fromkeys(section.get("required", ()), True)}


def schema_at(path: Sequence[str | int]) -> Schema | None:
    """The schema of the value at ``path``; None for an unknown key, and within ``kwargs``."""
    schema: Schema | None = json_schema()
    for step in path:
        inner = (
            item.get("items")
            if isinstance(step, int)
            else item.get("properties", {}).get(step) or item.get("additionalProperties")
            for item in alternatives(schema or {})
        )
        schema = next((each for each in inner if isinstance(each, dict)), None)
    return schema


def alternatives(schema: Schema) -> Iterator[Schema]:
    """The alternatives of a schema, with references resolved and without null."""
    if "$ref" in schema:
        yield from alternatives(json_schema()["$defs"][schema["$ref"].rpartition("/")[2]])
    elif "anyOf" in schema:
        for item in schema["anyOf"]:
            yield from alternatives(item)
    elif schema.get("type") != "null":
        yield schema


def properties(schema: Schema | None) -> dict[str, Schema]:
    """The keys that a mapping may have."""
    each = (item["properties"] for item in alternatives(schema or {}) if "properties" in item)
    return next(each, {})


def choices(schema: Schema) -> list[str]:
    """The words that a schema allows."""
    words = (
        item.get("enum", [item["const"]] if "const" in item else [])
        for item in alternatives(schema)
    )
    return [str(word) for each in words for word in each]


_SYNONYMS = {
    "bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16-weights",
    "fp16": "float16",
    "half": "float16",
    "16-mixed": "float16",
    "fp32": "float32",
    "tf32": "high",
}
"""Names of other programs for what a key may be."""


def describe_schema(schema: Schema) -> str:
    """The values that a schema allows, in words: ``auto or a whole number of at least 1``."""
    parts: list[str] = []
    for item in alternatives(schema):
        if "title" in item:
            parts.append(item["title"])
        elif words := choices(item):
            parts += words
        elif item.get("type") == "integer":
            parts.append(f"a whole number of at least {item['minimum']}")
        elif item.get("type") == "boolean":
            parts += ["true", "false"]
        elif item.get("type") == "number":
            least = "a number of at least 0" if "minimum" in item else "a number"
            parts.append("a number above 0" if "exclusiveMinimum" in item else least)
        else:
            parts.append(_TYPES.get(str(item["type"]), "text"))
    return " or ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def explain_fault(root: Node, detail: ErrorDetails) -> Problem:
    """The problem for a pydantic error: its place, the expected and the actual value."""
    path, kind, context = detail["loc"], detail["type"], detail.get("ctx", {})
    error = context.get("error")
    if isinstance(error, ValueError) and str(error):
        at_key = path[-1] == "[key]"
        return root.problem(path[:-1] if at_key else path, str(error), at_key=at_key)
    if kind == "extra_forbidden":
        return root.problem(path, _explain_unknown_key(root, path), at_key=True)
    if kind == "missing":
        return root.problem(path, "missing", at_key=True)
    nodes = root.nodes(path)
    path, value = path[: len(nodes) - 1], nodes[-1].value  # pydantic adds names of types
    schema = schema_at(path) or {"title": "something else"}
    allowed = f"at most {context['le']}" if kind == "less_than_equal" else describe_schema(schema)
    text = describe(value)
    in_quotes = isinstance(value, str) and not isinstance(value, Plain)
    if kind in _NUMBERS and in_quotes and not isinstance(parse_scalar(value), str | None):
        text = f"the text {text}; remove the quotes"
    word = value[:100] if isinstance(value, str) else ""
    known = choices(schema)
    meant = did_you_mean(word, known, similarity=0.8)
    if (synonym := _SYNONYMS.get(word.lower())) in known:
        meant = f"; did you mean {synonym!r}?"
    elif isinstance(value, str) and all(
        item.get("type") == "array" for item in alternatives(schema)
    ):
        meant = "; write every entry on a line of its own, after '- '"
    return root.problem(path, f"must be {allowed}, not {text}{meant}")


def _explain_unknown_key(root: Node, path: KeyPath) -> str:
    """The message for an unknown key: where it belongs, or the most similar key.

    That it is a key elsewhere, whose type its value has, says more than that it is similar.
    """
    key = str(path[-1])[:100]
    if fault := fault_of_foreign_key(path):
        return fault
    names, node = properties(schema_at(path[:-1])), root.nodes(path)[-1]
    is_factory = "kwargs" in names
    places: list[KeyPath] = [
        (*where[:-1], "kwargs", key)
        for where, _, kwargs in factories_in(root.data)
        if key in kwargs and where[-1] == "factory"
    ]
    named = [each for each in _paths() if each[-1] == key]
    places = [each for each in named if _may_be(each, node.data)] or places or named
    in_python = node.place.file == IN_PYTHON
    is_option = not node.place.line and not in_python and isinstance(node.value, str)
    meant = did_you_mean(key, names, similarity=0.8 if is_factory else 0.6)
    if not places and meant and not is_option:
        return f"unknown key{meant}"
    if not places and meant:
        places = [(*path[:-1], name) for name in names if repr(name) in meant]
    if not places and is_factory:
        places = [(*path[:-1], "kwargs", key)]
    if not places:
        names_of = {str(each[-1]): each for each in reversed(_paths())}
        similar = get_close_matches(key, names_of, n=1, cutoff=0.8)
        places = [names_of[name] for name in similar]
    if not places:
        return f"unknown key; known are {', '.join(names)}"
    keys = map(path_text, places[:_MAX_PLACES])
    words = [f"{key}={printable(node.value)}" if is_option else f"'{key}'" for key in keys]
    return f"unknown key; did you mean {' or '.join(words)}?"


@cache
def _paths() -> list[KeyPath]:
    """The path of every key of the spec, except those that users choose; required ones first."""
    found, waiting = list[tuple[bool, int, KeyPath]](), list[KeyPath]([()])
    while waiting:
        outer = waiting.pop()
        schema = schema_at(outer) or {}
        needed = required_keys(schema)
        inner: list[tuple[str | int, ...]] = [(*outer, name) for name in properties(schema)]
        found += [(each[-1] not in needed, len(each), each) for each in inner]
        waiting += inner
    return [path for *_, path in sorted(found)]


def _may_be(path: KeyPath, value: Any) -> bool:
    """Whether a value has one of the types that the schema at a path allows."""
    value = resolve(value) if isinstance(value, str) else value
    kinds = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    kind = kinds.get(type(value), "string")
    for item in alternatives(schema_at(path) or {}):
        if "enum" in item or "const" in item:
            if str(value) in choices(item):
                return True
            continue
        types = {item["type"]} if isinstance(item["type"], str) else {*item["type"]}
        if kind in types or (kind == "integer" and "number" in types):
            return True
    return False
