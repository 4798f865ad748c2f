"""The JSON Schema of the job spec, for editors. It accepts whatever the loader accepts."""

from __future__ import annotations

from typing import Any

from pipectl.spec.models import JobSpec

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema, made from the models."""
    schema = JobSpec.model_json_schema()
    return {"$schema": _DIALECT, "title": "pipectl job spec", **schema}
