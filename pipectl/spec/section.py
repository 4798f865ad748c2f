"""What every section of the spec is: an immutable mapping with known keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A mapping of the spec: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
