"""The job spec: loading, checking, writing and documenting it."""

from pipectl.spec.keys import links_key, plan_key, profile_key
from pipectl.spec.load import (
    Origin,
    Point,
    dump,
    load,
    load_sweep,
    load_text,
    load_with_origins,
    site_files,
)
from pipectl.spec.models import JobSpec
from pipectl.spec.schema import json_schema
from pipectl.spec.types import SCHEDULE_SUFFIX

__all__ = [
    "SCHEDULE_SUFFIX",
    "JobSpec",
    "Origin",
    "Point",
    "dump",
    "json_schema",
    "links_key",
    "load",
    "load_sweep",
    "load_text",
    "load_with_origins",
    "plan_key",
    "profile_key",
    "site_files",
]
