"""What every section of the spec is: an immutable mapping with known keys."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from pipectl.spec.tree import is_null


def without_nulls(value: Any) -> Any:
    """A mapping without its null entries: they count as not given."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if not is_null(item)}


class Section(BaseModel):
    """A mapping of the spec: immutable, unknown keys refused, null keys not given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = cls.model_fields
        return {key: item for key, item in value.items() if key not in known or not is_null(item)}
