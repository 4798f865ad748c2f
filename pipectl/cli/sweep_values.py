"""The values of a point of a sweep, in few characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_LONGEST = 24
"""Characters of a value."""


def values_text(values: Mapping[str, Any]) -> str:
    """The values of a point in a line, by the last words of their keys: ``lr=0.001 seed=2``."""
    shorts = short_keys(list(values))
    return " ".join(f"{shorts[key]}={shown(values, key)}" for key in values)


def short_keys(keys: Sequence[str], taken: Sequence[str] = ()) -> dict[str, str]:
    """Keys by as few of their last words as tell them apart, and from what is ``taken``."""
    found = {}
    keys = list(dict.fromkeys(keys))
    for key in keys:
        words = key.split(".")
        tails = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        found[key] = next(
            (tail for tail in tails if tail not in taken and _is_only(tail, keys)), key
        )
    return found


def _is_only(tail: str, keys: Sequence[str]) -> bool:
    return sum(key == tail or key.endswith(f".{tail}") for key in keys) == 1


def shown(values: Mapping[str, Any], key: str) -> str:
    """A value, shortened; empty where the point has none for this key."""
    if key not in values:
        return ""
    text = "null" if values[key] is None else str(values[key])
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
