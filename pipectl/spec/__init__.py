"""The job spec: loading, checking, writing and documenting it.

YAML text -> Node, with places -> layers merged -> JobSpec -> Problems | profile_key, plan_key
   document                         load           models,      checks,        keys
                                                   types        schema
"""

from pipectl.spec.keys import evaluation_key, links_key, plan_key, profile_key, script_key
from pipectl.spec.load import Origin, Point, SpecFile, dump, load, site_files
from pipectl.spec.models import JobSpec
from pipectl.spec.types import SCHEDULE_SUFFIX
from pipectl.spec.values import override_texts

__all__ = [
    "SCHEDULE_SUFFIX", "JobSpec", "Origin", "Point", "SpecFile", "dump", "evaluation_key",
    "links_key", "load", "override_texts", "plan_key", "profile_key", "script_key",
    "site_files",
]  # fmt: skip
