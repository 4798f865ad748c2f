"""Text from users, models and files of others, made harmless for terminals and logs."""

from __future__ import annotations

import json
import re
from typing import Any

_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What moves the cursor, changes colours or turns text around, apart from newlines and tabs."""


def first_harmful(text: str) -> str | None:
    """The first such character of a text."""
    if text.isascii() and text.isprintable():
        return None
    match = _HARMFUL.search(text)
    return match and match[0]


def printable(text: object) -> str:
    """A text without what a terminal would obey instead of show."""
    string = str(text)
    return string if string.isascii() and string.isprintable() else _HARMFUL.sub("", string)


def printable_json(value: Any, indent: int | None = None) -> str:
    """JSON in which such characters are escaped: programs get the very text."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    return _HARMFUL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
