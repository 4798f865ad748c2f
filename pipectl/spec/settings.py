"""What a job asks for beside the defaults, and how two jobs differ."""

from __future__ import annotations

from typing import Any

from pipectl.fields import leaves
from pipectl.spec.models import JobSpec

_PRIVATE = {"variables"}
_OFTEN_PRIVATE = {*_PRIVATE, "setup", "teardown"}
"""Keys of ``environment`` with secrets, and those that may have some."""


def settings(spec: JobSpec) -> dict[str, Any]:
    """Return the values that are not their defaults, by dotted key, without what may be secret."""
    private: Any = {"environment": _OFTEN_PRIVATE, "site_defaults": True}
    return dict(leaves(spec.model_dump(mode="json", exclude=private, exclude_defaults=True)))


def values_for_others(spec: JobSpec) -> dict[str, Any]:
    """Return all values, as JSON has them, without what may be secret."""
    return spec.model_dump(mode="json", exclude={"environment": _OFTEN_PRIVATE})


def differences(
    before: JobSpec, after: JobSpec, *, shared: bool = False
) -> dict[str, tuple[Any, Any]]:
    """Return both values of every dotted key that differs, without environment variables.

    Args:
        shared: whether others will read them, so that lines of shell are left out, too.
    """
    private = {"environment": _OFTEN_PRIVATE if shared else _PRIVATE}
    old, new = (
        dict(leaves(spec.model_dump(mode="json", exclude=private))) for spec in (before, after)
    )
    keys = dict.fromkeys((*old, *new))
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}
