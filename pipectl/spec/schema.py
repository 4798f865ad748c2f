"""The JSON Schema of the job spec, for editors. It accepts whatever the loader accepts."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

from pipectl.spec.models import JobSpec
from pipectl.spec.section import Section
from pipectl.spec.structure import kind_of, sections

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema, made from the models."""
    schema = JobSpec.model_json_schema()
    for model in sections(JobSpec):
        _adapt(_mapping_schema(schema, model), model)
    definitions = schema.pop("$defs")
    return {"$schema": _DIALECT, **schema, "title": "pipectl job spec", "$defs": definitions}


def _mapping_schema(schema: dict[str, Any], model: type[Section]) -> dict[str, Any]:
    """The schema of a section's mapping; a factory has a short form beside it."""
    found: dict[str, Any] = schema if model is JobSpec else schema["$defs"][model.__name__]
    return found["anyOf"][0] if "anyOf" in found else found


def _adapt(schema: dict[str, Any], model: type[Section]) -> None:
    """Null stands for the default; defaults are shown as people write them."""
    schema.pop("title", None)
    for name, info in model.model_fields.items():
        field = schema["properties"][name]
        field.pop("title", None)
        field.pop("default", None)
        if isinstance(values := field.get("additionalProperties"), dict):
            field["additionalProperties"] = _or_null(values)
        if not info.is_required():
            schema["properties"][name] = _or_null(field) | _default(info)


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    description = {key: schema.pop(key) for key in ("description",) if key in schema}
    if {"type": "null"} in schema.get("anyOf", ()) or schema.get("type") == "null":
        return description | schema
    if "anyOf" in schema:
        return description | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return description | {"anyOf": [schema, {"type": "null"}]}


def _default(info: FieldInfo) -> dict[str, Any]:
    kind = kind_of(info)
    shown = info.default if kind is None else kind.dump(info.default)
    return {"default": shown} if isinstance(shown, bool | int | float | str) else {}
