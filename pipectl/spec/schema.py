"""The JSON Schema of the job spec: pydantic's, for editors, messages and the reference.

It accepts whatever the loader accepts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from pipectl.spec.models import JobSpec
from pipectl.spec.types import Section

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NULL = {"type": "null"}
_TYPES = {"boolean": "true or false", "object": "a mapping", "array": "a list"}

Schema = dict[str, Any]


class _WithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


@cache
def json_schema() -> Schema:
    """The schema; callers share it."""
    schema = JobSpec.model_json_schema(schema_generator=_WithoutTitles)
    definitions = schema.pop("$defs")
    _adapt(schema, JobSpec)
    models = {model.__name__: model for model in _subclasses(Section)}
    for name, definition in definitions.items():
        _adapt(definition.get("anyOf", [definition])[0], models[name])
    return {"$schema": _DIALECT, **schema, "title": "pipectl job spec", "$defs": definitions}


def schema_at(path: Sequence[str | int]) -> Schema | None:
    """What may be written at ``path``; None for no key of the spec, and within ``kwargs``."""
    schema = json_schema()
    for step in path:
        found = next((inner for item in options(schema) if (inner := _inner(item, step))), None)
        if found is None:
            return None
        schema = found
    return schema


def options(schema: Schema) -> Iterator[Schema]:
    """The alternatives of a schema, with references followed; null is none of them."""
    if "$ref" in schema:
        yield from options(json_schema()["$defs"][schema["$ref"].rpartition("/")[2]])
    elif "anyOf" in schema:
        for item in schema["anyOf"]:
            yield from options(item)
    elif schema.get("type") != "null":
        yield schema


def properties(schema: Schema | None) -> dict[str, Schema]:
    """The keys that a mapping may have."""
    found = {} if schema is None else [item.get("properties", {}) for item in options(schema)]
    return next(filter(None, found), {})


def words(schema: Schema) -> str:
    """What a value may be; completes "must be ...": ``auto or a whole number of at least 1``."""
    found: list[str] = []
    for item in options(schema):
        if "title" in item:
            found.append(item["title"])
        elif "enum" in item or "const" in item:
            found += map(str, item.get("enum", [item.get("const")]))
        elif item.get("type") == "integer":
            found.append(f"a whole number of at least {item['minimum']}")
        elif item.get("type") == "number":
            found.append("a number above 0")
        else:
            found.append(_TYPES.get(str(item.get("type")), "text"))
    return " or ".join(filter(None, (", ".join(found[:-1]), found[-1])))


def _inner(schema: Schema, step: str | int) -> Schema | None:
    if isinstance(step, int):
        return schema.get("items")
    other = schema.get("additionalProperties")
    return schema.get("properties", {}).get(step) or (other if isinstance(other, dict) else None)


def _adapt(schema: Schema, model: type[Section]) -> None:
    """Null stands for the default; defaults are shown as people write them."""
    schema.pop("title", None)
    defaults = model.model_construct().model_dump()
    for name, info in model.model_fields.items():
        field = schema["properties"][name]
        field.pop("default", None)
        if isinstance(values := field.get("additionalProperties"), dict):
            field["additionalProperties"] = _or_null(values)
        if not info.is_required():
            field = _or_null(field)
            default = defaults[name]
            if isinstance(default, bool | int | float) or (default and isinstance(default, str)):
                field["default"] = default
            elif default and isinstance(default, tuple):
                field["default"] = list(default)
        if info.description:
            field = {"description": " ".join(info.description.split()), **_undescribed(field)}
        schema["properties"][name] = field


def _or_null(schema: Schema) -> Schema:
    inner = _undescribed(schema)
    choices = inner["anyOf"] if set(inner) == {"anyOf"} else [inner]
    return {"anyOf": choices if _NULL in choices else [*choices, _NULL]}


def _undescribed(schema: Schema) -> Schema:
    return {key: item for key, item in schema.items() if key != "description"}


def _subclasses(model: type[Section]) -> Iterator[type[Section]]:
    for inner in model.__subclasses__():
        yield inner
        yield from _subclasses(inner)
